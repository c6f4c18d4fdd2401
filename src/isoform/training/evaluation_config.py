"""The run file's section on evaluation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from isoform.config.base import Count, Frozen, Positive
from isoform.data.config import DataConfig


class GreedySearch(Frozen):
    """The most probable token at every step."""

    kind: Literal["greedy"] = "greedy"


class BeamSearch(Frozen):
    """Beam search; see `isoform.generation.Beam`."""

    kind: Literal["beam"] = "beam"
    width: Count
    """Number of beams."""
    length_penalty: Literal["none", "length", "gnmt"] = "none"
    """What log-probabilities are divided by."""
    alpha: Positive = 1.0
    """Exponent of the penalty."""


MetricName = Literal[
    "nll", "bleu", "chrf", "ter", "exact_match", "token_error_rate", "accuracy", "macro_f1", "span_f1"
]


_TEXTS: tuple[MetricName, ...] = ("nll", "bleu", "chrf", "ter", "exact_match", "token_error_rate")
# What can be measured on each kind of data; those in front are measured where nothing is said.
_FITTING: dict[str, tuple[int, tuple[MetricName, ...]]] = {
    "parallel": (3, _TEXTS),
    "dates": (4, ("nll", "exact_match", "chrf", "bleu", "ter", "token_error_rate")),
    "prefix": (3, _TEXTS),
    "text": (1, ("nll",)),
    "labelled": (3, ("nll", "accuracy", "macro_f1")),
    "tagged": (3, ("nll", "accuracy", "span_f1")),
}


def default_metrics(data: DataConfig) -> tuple[MetricName, ...]:
    """The metrics of a kind of data where the run file names none."""
    count, names = _FITTING[data.kind]
    return names[:count]


class Evaluation(Frozen):
    """How the test part is scored, once, at the end (R35)."""

    metrics: tuple[MetricName, ...] | None = None
    """Names of metrics; unset: those that fit the data; an empty list: the test is not read."""
    search: Annotated[GreedySearch | BeamSearch, Field(discriminator="kind")] = GreedySearch()
    """How outputs are found."""
    max_new_tokens: Count = 128
    """The longest output."""
    batch_size: Count = 64
    """Texts generated at a time; the outputs do not depend on it."""


def refuse_misfits(settings: Evaluation, data: DataConfig) -> None:
    """Refuse metrics that the data cannot give.

    Raises:
        ValueError: names the metric and those that fit.
    """
    _, fitting = _FITTING[data.kind]
    for name in settings.metrics or ():
        if name not in fitting:
            raise ValueError(
                f"evaluation.metrics: {name!r} does not fit data of kind {data.kind!r};"
                f" expected some of {', '.join(fitting)}"
            )
