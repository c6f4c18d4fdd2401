"""Edit distance over symbols (Levenshtein 1966)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def edit_distance(first: Sequence[object], second: Sequence[object]) -> int:
    """The least number of insertions, deletions and substitutions that turn one sequence into the other."""
    if len(first) < len(second):
        first, second = second, first
    numbers: dict[object, int] = {}
    a = np.array([numbers.setdefault(s, len(numbers)) for s in first], dtype=np.int64)
    b = np.array([numbers.setdefault(s, len(numbers)) for s in second], dtype=np.int64)
    columns = np.arange(len(b) + 1)
    row = columns.copy()
    for i, symbol in enumerate(a, 1):
        # Row i of the table but for insertions, which a running minimum adds: d[j] = min over k ≤ j of
        # best[k] + (j - k).
        best = np.empty_like(row)
        best[0] = i
        np.minimum(row[1:] + 1, row[:-1] + (b != symbol), out=best[1:])
        row = np.minimum.accumulate(best - columns) + columns
    return int(row[-1])
