"""A GGUF file: its keys and its tensors, the latter turned back to floating numbers when they are read.

The container is read here (the `gguf` library takes some twenty seconds for a vocabulary of 50,000 tokens),
quantised blocks are undone by that library.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isoform.checkpoints.extras import need
from isoform.errors import ArtifactError

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# The format's numbers for types of values; 8 is text, 9 a list.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, LIST = 8, 9
VERSIONS = (2, 3)


class Entry(NamedTuple):
    """Where a tensor lies: shape, type and first byte."""

    shape: tuple[int, ...]
    kind: Any
    start: int
    size: int


class File:
    """One file, mapped. Quantised tensors are of float32.

    Args:
        path: the file.

    Raises:
        ArtifactError: the `gguf` library is missing, the file is truncated or not of the format.
    """

    def __init__(self, path: Path) -> None:
        self.where = path
        self._library = need("gguf", "gguf", f"{path}: the GGUF format")
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self._fields, self._tensors = _Header(self._map, self._library).read()
        except (struct.error, ValueError, KeyError, ArithmeticError, MemoryError) as error:
            raise ArtifactError(f"{path}: truncated, or not a GGUF file: {error}") from None
        for name, entry in self._tensors.items():
            if entry.start + entry.size > len(self._map):
                raise ArtifactError(f"{path}: truncated: it ends within tensor {name}")
        self._asked: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a key."""
        self._asked.add(name)
        return self._fields.get(name, default)

    def require(self, name: str) -> Any:
        """The value of a key that has to be there.

        Raises:
            ArtifactError: it is not.
        """
        if name not in self._fields:
            raise ArtifactError(f"{self.where}: {name} is missing")
        return self.get(name)

    def unasked(self, prefix: str) -> list[str]:
        """Keys under a prefix that nobody asked for."""
        return sorted(name for name in self._fields if name.startswith(prefix) and name not in self._asked)

    def names(self) -> list[str]:
        """All tensors."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """A tensor's type once it is read."""
        return PLAIN.get(self._tensors[name].kind.name, torch.float32)

    def kinds(self) -> list[str]:
        """The types of quantisation in the file."""
        return sorted({entry.kind.name for entry in self._tensors.values()})

    def view(self, name: str) -> Tensor:
        """The tensor."""
        return self.read(name)

    def read(self, name: str, into: Tensor | None = None) -> Tensor:
        """The tensor, in floating numbers, or put into a given one.

        Raises:
            ArtifactError: a type of quantisation that the library cannot undo.
        """
        import numpy as np

        shape, kind, start, size = self._tensors[name]
        if kind.name in PLAIN:
            raw = bytearray(self._map[start : start + size])
            found = torch.frombuffer(raw, dtype=PLAIN[kind.name]).view(shape)
        else:
            rows = np.frombuffer(self._map, np.uint8, size, start).reshape(math.prod(shape[:-1]), -1)
            try:
                found = torch.from_numpy(self._library.dequantize(rows, kind)).view(shape)
            except (NotImplementedError, ValueError) as error:
                raise ArtifactError(f"{self.where}: tensor {name} of type {kind.name}: {error}") from None
        return found if into is None else into.copy_(found)


class _Header:
    """Everything before the tensors, little-endian, from the first byte on."""

    def __init__(self, raw: mmap.mmap, library: Any) -> None:
        self._raw, self._library = raw, library
        self._place = 0

    def read(self) -> tuple[dict[str, Any], dict[str, Entry]]:
        if self._raw[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self._place = 4
        version = self._number("I")
        if version not in VERSIONS:
            raise ValueError(f"version {version} is not supported; known are 2 and 3")
        n_tensors, n_fields = self._number("Q"), self._number("Q")
        fields = {self._text(): self._value(self._number("I")) for _ in range(n_fields)}
        entries = {self._text(): self._entry() for _ in range(n_tensors)}
        step = int(fields.get("general.alignment", 32))
        data = -(-self._place // step) * step
        return fields, {name: e._replace(start=e.start + data) for name, e in entries.items()}

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self._raw, self._place)
        self._place += struct.calcsize(f"<{form}")
        return value

    def _text(self) -> str:
        length = self._number("Q")
        found = self._raw[self._place : self._place + length]
        if len(found) != length:
            raise ValueError("it ends within a text")
        self._place += length
        return found.decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == TEXT:
            return self._text()
        if kind != LIST:
            return self._number(NUMBERS[kind])
        inner, count = self._number("I"), self._number("Q")
        if inner in (TEXT, LIST):
            return [self._value(inner) for _ in range(count)]
        form = f"<{count}{NUMBERS[inner]}"
        values = struct.unpack_from(form, self._raw, self._place)
        self._place += struct.calcsize(form)
        return list(values)

    def _entry(self) -> Entry:
        """Dimensions are written backwards."""
        shape = tuple(reversed([int(self._number("Q")) for _ in range(self._number("I"))]))
        kind = self._library.GGMLQuantizationType(self._number("I"))
        block, n_bytes = self._library.GGML_QUANT_SIZES[kind]
        return Entry(shape, kind, self._number("Q"), math.prod(shape) // block * n_bytes)
