"""How a fit ended."""

from __future__ import annotations

import dataclasses
from typing import Literal

from isoform.training.precision import Chosen
from isoform.training.selection import Weights
from isoform.training.state import RunState
from isoform.training.trial import Trial

Stop = Literal["steps", "max_seconds", "patience", "signal"]


@dataclasses.dataclass(frozen=True)
class FitResult:
    """How a fit ended.

    Attributes:
        state: counters at the last update.
        stop: why it ended; after ``"signal"`` the same call goes on.
        signal: number of the signal, if that was it.
        weights: which weights the network was left with: the ``"best"`` checkpoint's, the mean of the last
            (``"average"``), or the ``"last"``.
        validation_nll: of these weights; None without a validation part.
        precision: what the arithmetic ran in.
        trial: the step tried before the first; None when the run was resumed.
    """

    state: RunState
    stop: Stop
    signal: int | None
    weights: Weights
    validation_nll: float | None
    precision: Chosen
    trial: Trial | None

    @property
    def finished(self) -> bool:
        """Whether training came to its end."""
        return self.stop != "signal"
