"""Learning rates as pure functions of the step.

Every formula counts updates from 1: ``rate(schedule, s, …)`` is what the s-th update uses.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from isoform.config.base import Count, Frozen, Index, Positive

Share = Annotated[float, Field(strict=True, ge=0.0, le=1.0)]


class Noam(Frozen):
    """factor · d_model^-½ · min(s^-½, s · warmup^-3/2) (Vaswani et al. 2017, eq. 3)."""

    kind: Literal["noam"] = "noam"
    factor: Positive = 1.0
    """Multiplies the whole."""
    warmup: Count
    """Updates of linear growth."""


class InverseSqrt(Frozen):
    """lr · s/warmup, then lr · √(warmup/s)."""

    kind: Literal["inverse_sqrt"] = "inverse_sqrt"
    lr: Positive
    """The highest rate, reached at the end of the warmup."""
    warmup: Count
    """Updates of linear growth."""


class Cosine(Frozen):
    """lr · s/warmup, then half a cosine from lr down to lr · final at the last update."""

    kind: Literal["cosine"] = "cosine"
    lr: Positive
    """The highest rate."""
    warmup: Index = 0
    """Updates of linear growth."""
    final: Share = 0.0
    """The last rate as a share of the highest."""


class Linear(Frozen):
    """lr · s/warmup, then a straight line from lr down to lr · final at the last update."""

    kind: Literal["linear"] = "linear"
    lr: Positive
    """The highest rate."""
    warmup: Index = 0
    """Updates of linear growth."""
    final: Share = 0.0
    """The last rate as a share of the highest."""


class Constant(Frozen):
    """lr · s/warmup, then lr."""

    kind: Literal["constant"] = "constant"
    lr: Positive
    """The rate."""
    warmup: Index = 0
    """Updates of linear growth."""


Schedule = Annotated[Noam | InverseSqrt | Cosine | Linear | Constant, Field(discriminator="kind")]


def needs_total(schedule: Noam | InverseSqrt | Cosine | Linear | Constant) -> bool:
    """Whether the schedule ends at a known last update."""
    return isinstance(schedule, Cosine | Linear)


def rate(
    schedule: Noam | InverseSqrt | Cosine | Linear | Constant, step: int, *, d_model: int, total: int | None
) -> float:
    """The learning rate of an update.

    Args:
        schedule: the rule.
        step: number of the update, from 1.
        d_model: width of the network; only `Noam` uses it.
        total: number of the last update; only `Cosine` and `Linear` use it.
    """
    if isinstance(schedule, Noam):
        return schedule.factor * d_model**-0.5 * min(step**-0.5, step * schedule.warmup**-1.5)
    if step <= schedule.warmup:
        return schedule.lr * step / schedule.warmup
    if isinstance(schedule, InverseSqrt):
        return schedule.lr * math.sqrt(schedule.warmup / step)
    if isinstance(schedule, Constant):
        return schedule.lr
    assert total is not None, "cosine and linear schedules end at a known update"
    done = min((step - schedule.warmup) / max(total - schedule.warmup, 1), 1.0)
    left = 0.5 * (1 + math.cos(math.pi * done)) if isinstance(schedule, Cosine) else 1 - done
    return schedule.lr * (schedule.final + (1 - schedule.final) * left)
