"""The file ``model.bin``: named variables, in versions 2 and 6 of its layout."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from isoform.checkpoints.shards import InMemory
from isoform.errors import ArtifactError

VERSIONS = (2, 6)
BY_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.float32}
BY_NUMBER = (torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16)


class Variables(InMemory):
    """Named variables. Names are turned to dots, gamma and beta to weight and bias.

    Args:
        where: what to call them in messages.
        kind: the model's class there.
        tensors: by name.
        aliases: second names of some of them.
    """

    def __init__(
        self, where: Path, kind: str, tensors: Mapping[str, Tensor], aliases: Mapping[str, str]
    ) -> None:
        self.kind = kind
        whole = _dequantised({_renamed(name): tensor for name, tensor in tensors.items()})
        self.aliases = {_renamed(name): _renamed(other) for name, other in aliases.items()}
        whole.update({name: whole[other] for name, other in self.aliases.items() if other in whole})
        self._settings = {name: t for name, t in whole.items() if t.dim() == 0}
        super().__init__(where, {name: t for name, t in whole.items() if t.dim() > 0})
        self._asked: set[str] = set()

    def setting(self, name: str, default: float) -> float:
        """A number that is part of the architecture."""
        self._asked.add(name)
        if name not in self._settings:
            return default
        value = self._settings[name]
        # The shortest decimal that is this float32: 0.7, not 0.699999988.
        return float(f"{value.item():.7g}") if value.is_floating_point() else value.item()

    def is_switch(self, name: str) -> bool:
        """Whether a number is of one byte."""
        return name not in self._settings or self._settings[name].dtype == torch.int8

    def has_setting(self, name: str) -> bool:
        """Whether a number is there."""
        return name in self._settings

    def unasked(self) -> list[str]:
        """Numbers that nobody asked for: architecture that is not understood."""
        return sorted(set(self._settings) - self._asked)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape.

        Raises:
            ArtifactError: it is missing.
        """
        if name not in self._tensors:
            raise ArtifactError(f"{self.where}: missing: {name}")
        return super().shape(name)

    def same(self, a: str, b: str) -> bool:
        """Whether two names stand for one tensor."""
        root = {name: self.aliases.get(name, name) for name in (a, b)}
        return root[a] == root[b]


def read(path: Path) -> Variables:
    """All variables of a file.

    Raises:
        ArtifactError: another version, or a file that ends too early or too late.
    """
    raw = path.read_bytes()
    place = 0

    def take(form: str) -> int:
        nonlocal place
        (value,) = struct.unpack_from(f"<{form}", raw, place)
        place += struct.calcsize(f"<{form}")
        return value

    def text() -> str:
        nonlocal place
        length = take("H")
        place += length
        return raw[place - length : place - 1].decode("utf-8")

    def tensor(version: int) -> Tensor:
        nonlocal place
        shape = [take("I") for _ in range(take("B"))]
        if version == 2:
            kind, size = BY_SIZE[take("B")], take("I")
            size *= kind.itemsize
        else:
            kind, size = BY_NUMBER[take("B")], take("I")
        if place + size > len(raw):
            raise struct.error("it ends within a tensor")
        place += size
        if not size:
            return torch.empty(shape, dtype=kind)
        return torch.frombuffer(bytearray(raw[place - size : place]), dtype=kind).view(shape)

    try:
        version = take("I")
        if version not in VERSIONS:
            known = " and ".join(map(str, VERSIONS))
            raise ArtifactError(f"{path}: binary version {version} is not supported; known are {known}")
        kind = text()
        take("I")  # the revision of the class
        found = {text(): tensor(version) for _ in range(take("I"))}
        aliases = {} if version == 2 else {text(): text() for _ in range(take("I"))}
        variables = Variables(path, kind, found, aliases)
    except (struct.error, LookupError, ValueError, RuntimeError, TypeError) as error:
        raise ArtifactError(f"{path}: truncated, or not a CTranslate2 binary: {error}") from None
    if place != len(raw):
        raise ArtifactError(f"{path}: {len(raw) - place} bytes are left after the last variable")
    return variables


def _dequantised(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Integer weights divided by their scales, one a row or one for all."""
    result: dict[str, Tensor] = {}
    for name, tensor in found.items():
        scale = found.get(f"{name}_scale")
        if name.endswith("_scale") and name.removesuffix("_scale") in found:
            continue
        if scale is None:
            result[name] = tensor
        else:
            result[name] = tensor.float() / (scale[:, None] if scale.numel() > 1 else scale)
    return result


def _renamed(name: str) -> str:
    stem, _, last = name.replace("/", ".").rpartition(".")
    modern = {"gamma": "weight", "beta": "bias"}.get(last, last)
    return f"{stem}.{modern}" if stem else modern
