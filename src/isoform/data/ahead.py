"""Batches made before they are asked for, while the step before them computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
AHEAD = 2  # values made before they are asked for


def read_ahead(source: Iterable[T]) -> Generator[T]:
    """The same values in the same order; the next ones are made by a thread meanwhile.

    A step's kernels let other threads run, so that what takes time in making a batch (pages of a corpus on
    disk that are not in memory yet, above all) is over when the batch is asked for. Never more than a few
    values are held. An error is raised where its value would have come. The thread ends when the values do,
    and before ``close`` returns; wrap the generator in `contextlib.closing` where it may be left earlier.

    Args:
        source: what makes the values. It runs in the thread, and must draw from no random generator that
            others draw from.
    """
    room, made = threading.Semaphore(AHEAD), queue.SimpleQueue[tuple[T, ...] | BaseException]()
    left = threading.Event()

    def make() -> None:
        values = iter(source)
        while True:
            room.acquire()
            if left.is_set():
                return
            try:
                made.put((next(values),))
            except StopIteration:
                made.put(())
                return
            except BaseException as error:
                made.put(error)
                return

    thread = threading.Thread(target=make, name="read ahead", daemon=True)
    thread.start()
    try:
        while (found := made.get()) != ():
            if isinstance(found, BaseException):
                raise found
            room.release()
            yield found[0]
    finally:
        left.set()
        room.release()
        thread.join()
