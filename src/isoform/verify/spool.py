"""Values of a pass that are too many for memory: written to a file at once, mapped from it afterwards."""

from __future__ import annotations

import ctypes
import mmap
import tempfile
from collections.abc import Callable

import torch
from torch import Tensor

from isoform.verify.recording import Geometry, flattened, seen_through

IN_MEMORY = 1 << 29
"""Bytes of activations (512 MiB) that a recording keeps in memory; what comes after them goes to disk."""

_ALIGNED = 64
_HOARD = 1 << 26
"""Bytes that are spooled between two times that freed memory is given back to the system."""


class Spool:
    """A temporary file of values, in the folder that ``TMPDIR`` names; it is gone with the last of them."""

    def __init__(self) -> None:
        self._file = tempfile.NamedTemporaryFile(prefix="isoform-recording-")  # noqa: SIM115
        self._size = self._given_back = 0
        self._give_back = _trim()

    def add(self, value: Tensor) -> int:
        """Write the memory of a tensor that owns it and return where it begins."""
        self._file.write(b"\0" * (-self._size % _ALIGNED))
        start = self._size + -self._size % _ALIGNED
        content = flattened(value.detach()).view(torch.uint8)
        self._file.write(content.numpy().data)
        self._size = start + content.numel()
        if self._size - self._given_back >= _HOARD:  # glibc finds little use for what it has of other sizes
            self._given_back = self._size
            self._give_back()
        return start

    def mapped(self) -> Mapped:
        """The file as memory; nothing can be added to it any more, and its name is gone."""
        self._file.flush()
        found = Mapped(mmap.mmap(self._file.fileno(), self._size, access=mmap.ACCESS_COPY))
        self._file.close()
        return found


class Mapped:
    """Values in a file, in memory while they are looked at."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._give_back = _trim()
        self._whole = torch.frombuffer(memory, dtype=torch.uint8)

    def values(self, places: dict[int, tuple[int, int, torch.dtype, Geometry]]) -> dict[int, Tensor]:
        """Tensors mapped from the file, by key: places are (start, bytes, dtype, geometry)."""
        return {
            key: seen_through(self._whole[start : start + size], dtype, place)
            for key, (start, size, dtype, place) in places.items()
        }

    def release(self) -> None:
        """Give the memory back that what was looked at takes; it is read again when it is looked at again."""
        if hasattr(self._memory, "madvise"):
            self._memory.madvise(mmap.MADV_DONTNEED)
        self._give_back()


def _trim() -> Callable[[], object]:
    """What gives freed memory back to the system; nothing does where the C library is another than glibc."""
    try:
        call = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return lambda: None
    return lambda: call(0)
