"""A bar for work that may take longer than two seconds; nothing when the output is not a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
PATIENCE = 2.0  # seconds


def track(items: Iterable[T], *, total: int | None, what: str) -> Iterator[T]:
    """Pass items on; after two seconds show how many of ``total`` (None: unknown) are done, on stderr."""
    start, shown = time.monotonic(), False
    bar = task = None
    try:
        for done, item in enumerate(items):
            if not shown and time.monotonic() - start > PATIENCE:
                shown = True
                from rich.console import Console
                from rich.progress import Progress

                console = Console(stderr=True)
                bar = Progress(console=console, disable=not console.is_terminal, transient=True)
                bar.start()
                task = bar.add_task(what, total=total)
            if bar is not None and task is not None:
                bar.update(task, completed=done)
            yield item
    finally:
        if bar is not None:
            bar.stop()
