"""How the process keeps its memory while it trains: nothing is given back to be asked for again."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Generator
from typing import Any

TRIM, MAPPED = -1, -3
"""glibc's names of what `mallopt` sets: free bytes at the heap's end, and sizes, from which on the system is
asked."""
LARGE = 2**30
USUAL = 2**25
"""What glibc comes to by itself in a process that frees tensors, the largest it allows (twice that for
`TRIM`)."""


@contextlib.contextmanager
def settled_heap() -> Generator[None]:
    """Inside, freed tensors stay with the process, and Python's collector looks at new objects alone.

    Every step makes and frees the same tensors. By default glibc hands large ones back to the system, which
    clears each page before the next step gets it; and the collector, started by the nodes of every graph,
    walks through all that was ever imported. Neither changes a result. Where the C library is another one,
    only the second is done.
    """
    change = _mallopt()
    if change is not None:
        change(MAPPED, LARGE)
        change(TRIM, LARGE)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if change is not None:
            change(MAPPED, USUAL)
            change(TRIM, 2 * USUAL)


def _mallopt() -> Callable[[int, int], Any] | None:
    try:
        return ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return None
