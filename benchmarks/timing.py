"""How everything here is timed: in turns, so that a busy moment of the machine hits all alike, by medians."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping

Run = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured figure.

    Args:
        case: what was done, e.g. "GPT-2 small, batch 1, prompt 32".
        who: which implementation, with its version of the weights.
        seconds: median of a run.
        rate: units of work a second, e.g. new tokens.
        equal: what was found when its outputs were held against the reference's.
        limit: share of the machine's limit that it reached; None: not worked out.
        note: anything else.
    """

    case: str
    who: str
    seconds: float
    rate: float
    equal: str
    limit: float | None = None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Section:
    """Figures that belong together.

    Args:
        title: heading.
        unit: what ``rate`` counts.
        rows: the figures; of each case the first is what the others are compared with.
        text: what has to be known to read them.
    """

    title: str
    unit: str
    rows: list[Row]
    text: str = ""


def in_turns(runs: Mapping[str, Run], repeats: int) -> dict[str, float]:
    """Median seconds of each, after one run that is not counted."""
    for run in runs.values():
        run()
    found: dict[str, list[float]] = {who: [] for who in runs}
    for _ in range(repeats):
        for who, run in runs.items():
            own = run_seconds(run)
            found[who].append(own)
    return {who: statistics.median(times) for who, times in found.items()}


def run_seconds(run: Run) -> float:
    """Wall seconds; a run that measures itself, in another process, returns its own figure."""
    start = time.perf_counter()
    own = run()
    return own if isinstance(own, float) else time.perf_counter() - start


def agreement(found: list[list[int]], expected: list[list[int]]) -> str:
    """Tokens of two runs that agree, up to the first difference of each row."""
    same = total = 0
    for mine, other in zip(found, expected, strict=True):
        total += len(other)
        same += next((i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), len(other))
    return "equal" if same == total else f"{same / total:.0%} before the first difference"
