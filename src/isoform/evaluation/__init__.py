"""Metrics with their signatures, confidence intervals and paired tests (R35)."""

from isoform.evaluation.edit import edit_distance
from isoform.evaluation.labels import accuracy, macro_f1, span_f1, tag_accuracy
from isoform.evaluation.likelihood import nll, row_nll
from isoform.evaluation.run import Evaluation, Item, Settings, evaluate
from isoform.evaluation.score import Bootstrap, Counted, PairedTest, Score, paired
from isoform.evaluation.texts import bleu, chrf, error_rate, exact_match, ter

__all__ = [
    "Bootstrap",
    "Counted",
    "Evaluation",
    "Item",
    "PairedTest",
    "Score",
    "Settings",
    "accuracy",
    "bleu",
    "chrf",
    "edit_distance",
    "error_rate",
    "evaluate",
    "exact_match",
    "macro_f1",
    "nll",
    "paired",
    "row_nll",
    "span_f1",
    "tag_accuracy",
    "ter",
]
