"""Training: loss, schedules, the resumable loop, run files (Algorithm 6.1)."""

from isoform.training.config import (
    BeamSearch,
    Evaluation,
    GreedySearch,
    PresetModel,
    RunConfig,
    Vocabularies,
    apply_overrides,
    read_run,
)
from isoform.training.fit import fit
from isoform.training.guard import DivergenceError
from isoform.training.loop import FitResult
from isoform.training.loss import (
    Sums,
    Work,
    batch_loss,
    check_fit,
    check_shift,
    check_supervision,
    smoothed_cross_entropy,
)
from isoform.training.schedule import Constant, Cosine, InverseSqrt, Linear, Noam, Schedule, rate
from isoform.training.settings import Optimizer, Training
from isoform.training.trial import Trial, trial_step
from isoform.training.validation import mean_nll

__all__ = [
    "BeamSearch",
    "Constant",
    "Cosine",
    "DivergenceError",
    "Evaluation",
    "FitResult",
    "GreedySearch",
    "InverseSqrt",
    "Linear",
    "Noam",
    "Optimizer",
    "PresetModel",
    "RunConfig",
    "Schedule",
    "Sums",
    "Training",
    "Trial",
    "Vocabularies",
    "Work",
    "apply_overrides",
    "batch_loss",
    "check_fit",
    "check_shift",
    "check_supervision",
    "fit",
    "mean_nll",
    "rate",
    "read_run",
    "smoothed_cross_entropy",
    "trial_step",
]
