"""Values of a pass that are too many for memory: written to a file at once, mapped from it afterwards."""

from __future__ import annotations

import os
import tempfile

import torch
from torch import Tensor

from isoform.verify.recording import Geometry, flattened, seen_through

IN_MEMORY = 1 << 29
"""Bytes of activations (512 MiB) that a recording keeps in memory; what comes after them goes to disk."""

_ALIGNED = 64


class Spool:
    """A temporary file of values, in the folder that ``TMPDIR`` names; it is gone with the last of them."""

    def __init__(self) -> None:
        self._file = tempfile.NamedTemporaryFile(prefix="isoform-recording-")  # noqa: SIM115
        self._size = 0

    def add(self, value: Tensor) -> int:
        """Write the memory of a tensor that owns it and return where it begins."""
        self._file.write(b"\0" * (-self._size % _ALIGNED))
        start = self._size + -self._size % _ALIGNED
        content = flattened(value.detach()).view(torch.uint8)
        self._file.write(content.numpy().data)
        self._size = start + content.numel()
        return start

    def values(self, places: dict[int, tuple[int, int, torch.dtype, Geometry]]) -> dict[int, Tensor]:
        """Tensors mapped from the file, by key: places are (start, bytes, dtype, geometry)."""
        self._file.flush()
        memory = torch.UntypedStorage.from_file(self._file.name, False, self._size)
        whole = torch.empty(0, dtype=torch.uint8).set_(memory)  # pyright: ignore[reportArgumentType]
        found = {
            key: seen_through(whole[start : start + size], dtype, place)
            for key, (start, size, dtype, place) in places.items()
        }
        if os.name == "posix":  # the mapping keeps the contents; the name is needed no more
            self._file.close()
        return found
