"""A figure with everything needed to repeat it (R35), and how sure it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from isoform.errors import DataError

Better = Literal["more", "less"]
Floats = NDArray[np.float64]
CHUNK = 2**23  # weights held at once while resampling


@dataclasses.dataclass(frozen=True)
class Score:
    """One metric's value.

    Args:
        name: of the metric, e.g. ``"bleu"``.
        value: the figure itself: 0–100 for BLEU, chrF and TER, a share or a rate otherwise, nats for NLL.
        signature: what was counted and how, so that another program can do it again.
        count: how many outputs, labels or tokens it is about.
        better: whether more of it is better or less.
        interval: lower and upper end of the confidence interval, if one was asked for.
        parts: figures that belong to it, by name.
    """

    name: str
    value: float
    signature: str
    count: int
    better: Better
    interval: tuple[float, float] | None = None
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])


@dataclasses.dataclass(frozen=True)
class Bootstrap:
    """How to resample.

    Args:
        resamples: how many test sets are drawn, with replacement and of the same size.
        seed: of the draws.
        level: share of the figures that the interval holds.
    """

    resamples: int = 1000
    seed: int = 12345
    level: float = 0.95

    def __post_init__(self) -> None:
        if self.resamples < 1 or not 0 < self.level < 1:
            raise DataError(
                f"bootstrap: {self.resamples} resamples at level {self.level}: expected at least 1, "
                "and a level between 0 and 1"
            )

    def signature(self) -> str:
        """Its part of a signature."""
        return f"bs:{self.resamples}|seed:{self.seed}|level:{self.level:g}"


@dataclasses.dataclass(frozen=True)
class Counted:
    """A metric as a function of sums over the items of a test set; so it can be resampled and grouped.

    Args:
        name: of the metric.
        counts: ``[items, k]`` what each item contributes.
        value: from sums ``[…, k]`` to values ``[…]``.
        signature: see `Score`.
        better: see `Score`.
        size: from sums ``[k]`` to the number that `Score.count` gives; default: the number of items.
        parts: from sums ``[k]`` to the figures that belong to it.
    """

    name: str
    counts: Floats
    value: Callable[[Floats], Floats]
    signature: str
    better: Better
    size: Callable[[Floats], int] | None = None
    parts: Callable[[Floats], Mapping[str, float]] | None = None

    def score(self, bootstrap: Bootstrap | None = None) -> Score:
        """The value over all items.

        Raises:
            DataError: there are none.
        """
        if not len(self.counts):
            raise DataError(f"{self.name}: there is nothing to score")
        sums = self.counts.sum(0)
        interval = None
        if bootstrap is not None:
            tail = (1 - bootstrap.level) / 2
            low, high = np.quantile(self.value(self.resampled(bootstrap)), [tail, 1 - tail])
            interval = float(low), float(high)
        return Score(
            name=self.name,
            value=float(self.value(sums)),
            signature=self.signature if bootstrap is None else f"{self.signature}|{bootstrap.signature()}",
            count=len(self.counts) if self.size is None else self.size(sums),
            better=self.better,
            interval=interval,
            parts={} if self.parts is None else self.parts(sums),
        )

    def groups(self, labels: Sequence[str]) -> dict[str, Score]:
        """The value over the items of each group, groups in alphabetical order."""
        names = np.array(labels)
        return {
            str(name): dataclasses.replace(self, counts=self.counts[names == name]).score()
            for name in np.unique(names)
        }

    def resampled(self, bootstrap: Bootstrap) -> Floats:
        """``[resamples, k]`` sums over test sets drawn with replacement (Efron 1979)."""
        n = len(self.counts)
        generator = np.random.default_rng(bootstrap.seed)
        step = max(1, CHUNK // n)
        sizes = [min(step, bootstrap.resamples - i) for i in range(0, bootstrap.resamples, step)]
        draws = (generator.multinomial(n, np.full(n, 1 / n), size=size) for size in sizes)
        return np.concatenate([draw @ self.counts for draw in draws])


@dataclasses.dataclass(frozen=True)
class PairedTest:
    """Whether two systems differ on one test set by more than its accidents (Koehn 2004).

    Args:
        first: the first system's score.
        second: the second's.
        difference: second minus first.
        interval: lower and upper end of the difference's confidence interval.
        p_value: how often test sets drawn like this one would show a difference at least as large if there
            were none.
    """

    first: Score
    second: Score
    difference: float
    interval: tuple[float, float]
    p_value: float


def paired(first: Counted, second: Counted, bootstrap: Bootstrap) -> PairedTest:
    """Both systems on the same resampled test sets.

    Raises:
        DataError: they were not scored on the same items, or not by the same metric.
    """
    if first.signature != second.signature or len(first.counts) != len(second.counts):
        raise DataError(
            f"a paired test needs one metric on the same items: {first.signature} on {len(first.counts)}, "
            f"{second.signature} on {len(second.counts)}"
        )
    one, two = first.score(bootstrap), second.score(bootstrap)
    difference = two.value - one.value
    drawn = second.value(second.resampled(bootstrap)) - first.value(first.resampled(bootstrap))
    tail = (1 - bootstrap.level) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail])
    # Around their own mean the differences are what they would be if the systems were equal.
    extreme = int((np.abs(drawn - drawn.mean()) >= abs(difference)).sum())
    p_value = (extreme + 1) / (bootstrap.resamples + 1)
    return PairedTest(one, two, difference, (float(low), float(high)), p_value)


def ratio(sums: Floats) -> Floats:
    """First sum over second."""
    return sums[..., 0] / sums[..., 1]
