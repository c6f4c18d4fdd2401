"""Training: loss, schedules, the resumable loop, run files (Algorithm 6.1)."""

from isoform.training.config import PresetModel, RunConfig, Vocabularies, read_run
from isoform.training.evaluation_config import BeamSearch, Evaluation, GreedySearch
from isoform.training.fit import fit
from isoform.training.guard import DivergenceError
from isoform.training.learner import Learner
from isoform.training.loss import Sums, Work, batch_loss, smoothed_cross_entropy
from isoform.training.overrides import apply_overrides
from isoform.training.preflight import RunPreflight, preflight
from isoform.training.result import FitResult
from isoform.training.run_folder import data_folder
from isoform.training.schedule import Constant, Cosine, InverseSqrt, Linear, Noam, Schedule, rate
from isoform.training.settings import Optimizer, Training
from isoform.training.supervision import check_fit, check_shift, check_supervision
from isoform.training.train import TrainResult, check, inspect_data, train
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
    "Learner",
    "Linear",
    "Noam",
    "Optimizer",
    "PresetModel",
    "RunConfig",
    "RunPreflight",
    "Schedule",
    "Sums",
    "TrainResult",
    "Training",
    "Trial",
    "Vocabularies",
    "Work",
    "apply_overrides",
    "batch_loss",
    "check",
    "check_fit",
    "check_shift",
    "check_supervision",
    "data_folder",
    "fit",
    "inspect_data",
    "mean_nll",
    "preflight",
    "rate",
    "read_run",
    "smoothed_cross_entropy",
    "train",
    "trial_step",
]
