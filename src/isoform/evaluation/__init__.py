"""Metrics with their signatures, confidence intervals and paired tests (R35)."""

from isoform.evaluation.edit import edit_distance
from isoform.evaluation.labels import accuracy, macro_f1, span_f1, tag_accuracy
from isoform.evaluation.likelihood import Likelihood, bits_per_byte, nll, row_likelihoods, row_nll
from isoform.evaluation.run import Evaluation, Item, Settings, evaluate
from isoform.evaluation.score import Bootstrap, Counted, PairedTest, Score, paired
from isoform.evaluation.side_by_side import SideBySide, side_by_side
from isoform.evaluation.texts import bleu, chrf, error_rate, exact_match, ter

__all__ = [
    "Bootstrap",
    "Counted",
    "Evaluation",
    "Item",
    "Likelihood",
    "PairedTest",
    "Score",
    "Settings",
    "SideBySide",
    "accuracy",
    "bits_per_byte",
    "bleu",
    "chrf",
    "edit_distance",
    "error_rate",
    "evaluate",
    "exact_match",
    "macro_f1",
    "nll",
    "paired",
    "row_likelihoods",
    "row_nll",
    "side_by_side",
    "span_f1",
    "tag_accuracy",
    "ter",
]
