"""What a person sees while a run goes on: a bar on a terminal, a line a validation elsewhere."""

from __future__ import annotations

import sys
from typing import Any

from isoform.training.log import Line


class Display:
    """Standard error: a bar with steps, loss, tokens/s, the share of time in which data were waited for and
    the time left, where it is a terminal; and remarks.

    Args:
        total: number of the last update; None where only time limits the run.
        seconds: the time limit, if any.
        done: updates made before.
        quiet: show nothing at all.
    """

    def __init__(self, *, total: int | None, seconds: float | None, done: int, quiet: bool) -> None:
        self._quiet, self._total, self._seconds = quiet, total, seconds
        self._bar: Any = None
        self._task: Any = None
        if quiet or not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[count]}"),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task(
            "training", total=seconds if total is None else total, completed=done if total else 0,
            count=self._count(done), figures="",
        )  # fmt: skip
        self._bar.start()

    def step(self, step: int, seconds: float) -> None:
        """An update was made."""
        if self._bar is not None:
            done = seconds if self._total is None else step
            self._bar.update(self._task, completed=done, count=self._count(step))

    def line(self, line: Line) -> None:
        """A line of the log."""
        if self._bar is not None and line.train_nll is not None:
            waiting = f"  waiting {line.waiting:.0%}" if line.waiting is not None else ""
            speed = f"{line.tokens_per_second or 0:,.0f} tokens/s"
            self._bar.update(self._task, figures=f"NLL {line.train_nll:.3f}  {speed}{waiting}")

    def validated(self, line: Line, best: bool) -> None:
        """A validation was made."""
        train = "" if line.train_nll is None else f"training NLL {line.train_nll:.4f}, "
        mark = " (best)" if best else ""
        self.say(f"step {self._count(line.step)}: {train}validation NLL {line.validation_nll:.4f}{mark}")

    def say(self, text: str) -> None:
        """A remark."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()

    def _count(self, step: int) -> str:
        return f"{step}" if self._total is None else f"{step}/{self._total}"
