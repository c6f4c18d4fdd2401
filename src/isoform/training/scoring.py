"""The test part, scored once, at the end (R35)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from isoform.data.batching import LabelledBatch
from isoform.data.config import LabelledData, TaggedData, TextData
from isoform.data.parts import Part
from isoform.data.pipeline import Prepared
from isoform.data.records import Pair, Prompted
from isoform.training.evaluation_config import BeamSearch, Evaluation, MetricName, default_metrics
from isoform.training.loss import Work

if TYPE_CHECKING:
    from isoform.checkpoints import Bundle
    from isoform.evaluation.score import Counted
    from isoform.generation import Search


def score(
    bundle: Bundle, prepared: Prepared, settings: Evaluation, *, quiet: bool
) -> dict[str, dict[str, Any]] | None:
    """Read the test part and score it.

    Returns:
        For each metric its value, signature, count and parts; None where the data have no test part, or
        nothing is to be measured: then it is not read.
    """
    names = default_metrics(prepared.task.data) if settings.metrics is None else settings.metrics
    part = prepared.test() if names else None
    if part is None:
        return None
    bundle.model.eval()
    counted = _measure(bundle, prepared, part, settings, names, quiet=quiet)
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        plain = dataclasses.asdict(counted[name].score())
        found[name] = {key: plain[key] for key in ("value", "signature", "count", "better", "parts")}
    return found


def _measure(
    bundle: Bundle,
    prepared: Prepared,
    part: Part,
    settings: Evaluation,
    names: Sequence[MetricName],
    *,
    quiet: bool,
) -> dict[str, Counted]:
    from isoform.evaluation.likelihood import nll, row_likelihoods

    data = prepared.task.data
    found: dict[str, Counted] = {}
    if "nll" in names:
        found["nll"] = nll(row_likelihoods(bundle.model, part.batches.epoch(0)))
    if isinstance(data, LabelledData | TaggedData):
        return found | _labels(bundle, prepared, part, data, names)
    if not isinstance(data, TextData) and set(names) - {"nll"}:
        found |= _texts(bundle, part, settings, names, quiet=quiet)
    return found


def _texts(
    bundle: Bundle, part: Part, settings: Evaluation, names: Sequence[MetricName], *, quiet: bool
) -> dict[str, Counted]:
    from isoform.evaluation import texts as metrics
    from isoform.generation.texts import TextGenerator

    kept = range(len(part.records)) if part.fit is None else part.fit.kept.tolist()
    records = [cast("Pair | Prompted", part.records.items[i]) for i in kept]
    sources, references = (
        [r.source if isinstance(r, Pair) else r.prompt for r in records],
        [r.target if isinstance(r, Pair) else r.answer for r in records],
    )
    writer = TextGenerator(
        bundle,
        search=search_of(settings),
        max_new_tokens=settings.max_new_tokens,
        batch_size=settings.batch_size,
    )
    outputs = [o[0].text for o in writer.write(sources, progress=None if quiet else "writing the test")]
    makers = {
        "bleu": metrics.bleu,
        "chrf": metrics.chrf,
        "ter": metrics.ter,
        "exact_match": metrics.exact_match,
        "token_error_rate": metrics.error_rate,
    }
    return {name: makers[name](outputs, references) for name in names if name in makers}


def search_of(settings: Evaluation) -> Search:
    """The search of the run file."""
    from isoform.generation import Beam, Greedy

    chosen = settings.search
    if isinstance(chosen, BeamSearch):
        return Beam(chosen.width, length_penalty=chosen.length_penalty, alpha=chosen.alpha)
    return Greedy()


def _labels(
    bundle: Bundle,
    prepared: Prepared,
    part: Part,
    data: LabelledData | TaggedData,
    names: Sequence[MetricName],
) -> dict[str, Counted]:
    from isoform.evaluation import labels as metrics

    names_of = sorted(prepared.classes, key=prepared.classes.__getitem__)
    predicted, gold = _predictions(bundle, part)
    mine = [[names_of[i] for i in row] for row in predicted]
    right = [[names_of[i] for i in row] for row in gold]
    if isinstance(data, TaggedData):
        tagged = {"accuracy": metrics.tag_accuracy, "span_f1": metrics.span_f1}
        return {name: tagged[name](mine, right) for name in names if name in tagged}
    whole = {"accuracy": metrics.accuracy, "macro_f1": metrics.macro_f1}
    first, other = [row[0] for row in mine], [row[0] for row in right]
    return {name: whole[name](first, other) for name in names if name in whole}


@torch.inference_mode()
def _predictions(bundle: Bundle, part: Part) -> tuple[list[list[int]], list[list[int]]]:
    """The class with the highest score at every supervised position, and the right one, row by row."""
    predicted: list[list[int]] = []
    gold: list[list[int]] = []
    device = bundle.model.embedding.weight.device
    for batch in part.batches.epoch(0):
        assert isinstance(batch, LabelledBatch)
        work = Work.of(batch, device)
        logits = bundle.model(work.tokens).logits
        assert logits is not None
        best = logits.flatten(0, -2).argmax(-1)[work.places].tolist()
        rows = (work.places // (1 if work.by_row else work.tokens.length)).tolist()
        first = len(predicted)
        for found in (predicted, gold):
            found += [[] for _ in batch.rows]
        for row, mine, right in zip(rows, best, work.labels.tolist(), strict=True):
            predicted[first + row].append(mine)
            gold[first + row].append(right)
    return predicted, gold
