"""What several seeds allow to say of a difference (R17)."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

LEVEL = 0.95


@dataclasses.dataclass(frozen=True)
class Spread:
    """Some figures in short.

    Attributes:
        count: how many there are.
        mean: of them.
        deviation: the standard deviation of a sample (n - 1); None of a single one.
    """

    count: int
    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Of some figures; None of none."""
        if not values:
            return None
        return cls(len(values), statistics.fmean(values), statistics.stdev(values) if values[1:] else None)

    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean by Student's t; None of a single figure."""
        if self.deviation is None:
            return None
        half = student_quantile((1 + LEVEL) / 2, self.count - 1) * self.deviation / math.sqrt(self.count)
        return self.mean - half, self.mean + half


def paired_difference(base: Mapping[int, float], other: Mapping[int, float]) -> Spread | None:
    """Other minus base, seed by seed: what a seed does to both alike is no part of the difference."""
    return Spread.of([other[seed] - base[seed] for seed in sorted(base.keys() & other.keys())])


def sentence(name: str, difference: Spread | None, n_diverged: int, n_seeds: int) -> str:
    """What may be said of one value of one factor against the base."""
    lost = f"; {n_diverged} of {n_seeds} seeds diverged" if n_diverged else ""
    if difference is None:
        return f"{name}: no seed ended in both{lost}"
    ends = difference.interval()
    if ends is None:
        return f"{name}: {difference.mean:+.4f} with one seed, which says nothing of chance{lost}"
    said = f"{difference.mean:+.4f} nats ({LEVEL:.0%} interval {ends[0]:+.4f} to {ends[1]:+.4f})"
    if ends[0] <= 0 <= ends[1]:
        return f"{name}: {said}: not told apart from the base by {difference.count} seeds{lost}"
    which = "better" if difference.mean < 0 else "worse"
    return f"{name}: {said}: {which} than the base beyond what {difference.count} seeds scatter{lost}"


def limits(n_comparisons: int) -> str:
    """What may not be concluded, whatever the figures are."""
    return (
        "This holds for this data, size, number of updates and the base's other settings, none of which was"
        " tuned anew for any value; it says nothing of larger networks, longer training or other rates, nor"
        f" of two changes made together. Of {n_comparisons} comparison{'s' * (n_comparisons != 1)} at"
        f" {LEVEL:.0%}, {n_comparisons * (1 - LEVEL):.2g} would look different by chance if none were."
    )


def student_quantile(share: float, freedom: int) -> float:
    """The quantile of Student's t distribution for a share above one half (Student 1908).

    By bisection of the distribution function, which for whole degrees of freedom is a finite sum (Abramowitz
    and Stegun 1964, 26.7.3 and 26.7.4).
    """
    low, high = 0.0, 1.0
    while _within(high, freedom) < 2 * share - 1:
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < 2 * share - 1 else (low, middle)
    return (low + high) / 2


def _within(t: float, freedom: int) -> float:
    """The probability of -t to t."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= cosine * cosine * k / (k + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
