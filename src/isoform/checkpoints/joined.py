"""Pieces of files as one tensor, without copying what can stay mapped.

A packed projection here is several tensors in a checkpoint, which rarely lie side by side. Where a piece
stands in its memory page as it does in the file's, its whole pages are mapped from the file straight to their
place in the packed tensor; only what is left over at its ends is copied.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import mmap
import os
import sys
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isoform.errors import ArtifactError

_HUGE = 2**21
_LEAST = 2**18  # bytes of a piece: a process may have some 65,000 mappings, and a short copy costs no more
_FIXED = 0x10  # MAP_FIXED of Linux, which the standard library does not name


@dataclasses.dataclass(frozen=True)
class Piece:
    """Bytes of a file."""

    path: Path
    begin: int
    n_bytes: int


def joined(pieces: Sequence[Piece], dtype: torch.dtype) -> Tensor:
    """The pieces one after the other, as a flat tensor. Pages are copied when they are written to.

    Raises:
        ArtifactError: a file ends too early, or the system refuses a mapping.
    """
    pieces = _merged(pieces)
    n_bytes, begin = sum(piece.n_bytes for piece in pieces), pieces[0].begin
    mapped = _mapped(pieces) if sys.platform == "linux" and begin % dtype.itemsize == 0 else {}
    whole = _room(n_bytes, begin % _HUGE) if mapped else _filled(n_bytes)
    address = whole.data_ptr()
    raw: Any = whole.numpy()
    done = 0
    with contextlib.ExitStack() as stack:
        files = {path: stack.enter_context(path.open("rb", buffering=0)) for path in {p.path for p in pieces}}
        for i, piece in enumerate(pieces):
            file, pages = files[piece.path], mapped.get(i, range(0))
            if pages:
                _map(file, piece, pages, address + done)
            for part in (range(pages.start), range(pages.stop, piece.n_bytes)):
                file.seek(piece.begin + part.start)
                if part and file.readinto(raw[done + part.start : done + part.stop]) != len(part):
                    raise ArtifactError(f"{piece.path}: truncated")
            done += piece.n_bytes
    return whole.view(dtype)


def _merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Neighbours in one file as one piece."""
    result = [pieces[0]]
    for piece in pieces[1:]:
        last = result[-1]
        if piece.path == last.path and piece.begin == last.begin + last.n_bytes:
            result[-1] = Piece(last.path, last.begin, last.n_bytes + piece.n_bytes)
        else:
            result.append(piece)
    return result


def _mapped(pieces: Sequence[Piece]) -> dict[int, range]:
    """Which bytes of which pieces can be mapped, where the first stands in memory as it does in its file."""
    page, place = mmap.PAGESIZE, pieces[0].begin
    result: dict[int, range] = {}
    for i, piece in enumerate(pieces):
        start = -place % page
        stop = start + (piece.n_bytes - start) // page * page
        if (place - piece.begin) % page == 0 and stop - start >= _LEAST:
            result[i] = range(start, stop)
        place += piece.n_bytes
    return result


def _map(file: FileIO, piece: Piece, pages: range, address: int) -> None:
    """Put pages of a file into memory of ours that begins at an address."""
    access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _FIXED
    place, offset = address + pages.start, piece.begin + pages.start
    if _system().mmap(place, len(pages), access, kind, file.fileno(), offset) != place:
        raise ArtifactError(f"{piece.path}: cannot be mapped: {os.strerror(ctypes.get_errno())}")


@functools.cache
def _system() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    return library


def _room(n_bytes: int, shift: int) -> Tensor:
    """Memory that begins so far into a huge page, of which nothing is there until it is touched.

    Where a file's contents are cached in large pieces, they are mapped so if both stand alike.
    """
    region = mmap.mmap(-1, n_bytes + 2 * _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = (shift - ctypes.addressof(ctypes.c_char.from_buffer(region))) % _HUGE
    return torch.frombuffer(region, dtype=torch.uint8, offset=start, count=n_bytes)


def _filled(n_bytes: int) -> Tensor:
    """Memory to copy into; much of it on huge pages where the system has them.

    Filling it is then no longer a page fault every 4 KiB, which costs more than the copy.
    """
    if n_bytes < 2 * _HUGE or sys.platform != "linux":
        return torch.empty(n_bytes, dtype=torch.uint8)
    region = mmap.mmap(-1, n_bytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(region)) % _HUGE
    with contextlib.suppress(OSError):  # a kernel without them
        region.madvise(mmap.MADV_HUGEPAGE, start, n_bytes // _HUGE * _HUGE)
    return torch.frombuffer(region, dtype=torch.uint8, offset=start, count=n_bytes)
