"""Tensors in files, and parameters made of them, without holding anything twice."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isoform.checkpoints.joined import Piece
from isoform.config import ModelConfig
from isoform.errors import ArtifactError
from isoform.nn import Transformer

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class SafetensorsFile:
    """One safetensors file: what is in it is known at once, contents are read when asked for.

    Raises:
        ArtifactError: no such file, or its header does not fit its length (a truncated download).
    """

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        if not path.is_file():
            raise ArtifactError(f"{path}: no such file")
        try:
            self._mapped = safe_open(path, framework="pt")  # validates offsets against the length
            self._mapped.__enter__()
        except (SafetensorError, OSError) as error:
            raise ArtifactError(f"{path}: truncated or damaged: {error}") from None
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length))
        self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        self._start = 8 + length
        self._header = header
        unknown = {name: e["dtype"] for name, e in header.items() if e["dtype"] not in DTYPES}
        if unknown:
            name, dtype = next(iter(unknown.items()))
            raise ArtifactError(f"{path}: tensor {name} has dtype {dtype}, which is not supported")

    def names(self) -> list[str]:
        """All tensors, in the order of the file."""
        return list(self._header)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return tuple(self._header[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """A tensor's type."""
        return DTYPES[self._header[name]["dtype"]]

    def view(self, name: str) -> Tensor:
        """The tensor mapped from the file: pages are read when touched, and copied when written to."""
        return self._mapped.get_tensor(name)

    def piece(self, name: str, first: int, last: int) -> Piece:
        """Where rows of a tensor lie, the last one excluded."""
        begin, end = self._header[name]["data_offsets"]
        row = (end - begin) // self._header[name]["shape"][0]
        return Piece(self.path, self._start + begin + first * row, (last - first) * row)

    def read(self, name: str, into: Tensor | None = None) -> Tensor:
        """The tensor in memory of its own, without mapped pages: for contents that get rearranged.

        Args:
            name: which one.
            into: a contiguous tensor of its shape and type to put it in; default: a new one.
        """
        entry = self._header[name]
        tensor = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]]) if into is None else into
        if tensor.numel():
            begin, end = entry["data_offsets"]
            with self.path.open("rb", buffering=0) as file:
                file.seek(self._start + begin)
                raw: Any = tensor.reshape(-1).view(torch.uint8).numpy()
                if file.readinto(raw) != end - begin:
                    raise ArtifactError(f"{self.path}: truncated at tensor {name}")
        return tensor


def skeleton(config: ModelConfig) -> Transformer:
    """The network without memory for its parameters (all on the meta device).

    Raises:
        ArtifactError: sizes whose product no tensor can have.
    """
    try:
        with torch.device("meta"):
            return Transformer(config)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ArtifactError(f"no network has the sizes of this configuration: {reason}") from None


def stored_names(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter, those that are shared once, under their first name."""
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def fill(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Give parameters their values. Every module that shares one gets the same new parameter (R27).

    Args:
        model: a `skeleton`.
        tensors: (stored name, value) pairs; each value becomes the parameter, nothing is copied.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    empty: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path, _, key = name.rpartition(".")
        empty[name] = parameter
        holders.setdefault(id(parameter), []).append((modules[path], key))
    for name, tensor in tensors:
        parameter = nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
        for module, key in holders.pop(id(empty[name])):
            setattr(module, key, parameter)
    assert not holders, list(holders.values())


def refuse_strangers(
    where: Path, wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]
) -> None:
    """Names and shapes must agree one to one.

    Raises:
        ArtifactError: tensors that are missing, unknown or misshaped, each by name (the first five).
    """
    faults: list[str] = []
    if missing := [n for n in wanted if n not in found]:
        faults.append(f"missing: {listed(missing)}")
    if extra := [n for n in found if n not in wanted]:
        faults.append(f"unknown: {listed(extra)}")
    wrong = [
        f"{n} is {list(found[n])}, expected {list(shape)}"
        for n, shape in wanted.items()
        if n in found and tuple(found[n]) != tuple(shape)
    ]
    if wrong:
        faults.append(f"wrong shape: {listed(wrong)}")
    if faults:
        raise ArtifactError(f"{where}: {'; '.join(faults)}")


def listed(names: list[str], most: int = 5) -> str:
    """Names in a line, the rest counted."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
