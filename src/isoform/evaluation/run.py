"""A network scored on one part of the data: generation, labels, likelihood, each with its signature (R35)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from isoform.data.batching import Batch, LabelledBatch
from isoform.data.parts import Part
from isoform.data.progress import track
from isoform.data.records import Document, Labelled, Pair, Prompted, Record, Tagged
from isoform.errors import ConfigError, DataError, did_you_mean
from isoform.evaluation import labels, likelihood, texts
from isoform.evaluation.score import Bootstrap, Counted, Score
from isoform.generation import Search
from isoform.generation.texts import TextGenerator
from isoform.nn import Transformer
from isoform.nn.exact import exact_products

if TYPE_CHECKING:
    from isoform.checkpoints import Bundle

GENERATED: dict[str, Callable[[Sequence[str], texts.References], Counted]] = {
    "exact_match": texts.exact_match,
    "chrf": texts.chrf,
    "bleu": texts.bleu,
    "ter": texts.ter,
    "token_error_rate": texts.error_rate,
    "character_error_rate": lambda outputs, right: texts.error_rate(outputs, right, unit="characters"),
}
LIKELIHOOD = ("nll", "bits_per_byte")
LABELS = {"accuracy": labels.accuracy, "macro_f1": labels.macro_f1}
TAGS = {"accuracy": labels.tag_accuracy, "span_f1": labels.span_f1}
KNOWN: dict[type[Record], tuple[str, ...]] = {
    Pair: (*LIKELIHOOD, *GENERATED),
    Prompted: (*LIKELIHOOD, *GENERATED),
    Document: LIKELIHOOD,
    Labelled: ("nll", *LABELS),
    Tagged: ("nll", *TAGS),
}
DEFAULT: dict[type[Record], tuple[str, ...]] = {
    Pair: ("nll", "exact_match", "chrf", "bleu"),
    Prompted: ("nll", "exact_match", "chrf"),
    Document: ("nll",),
    Labelled: ("nll", "accuracy", "macro_f1"),
    Tagged: ("nll", "accuracy"),
}


@dataclasses.dataclass(frozen=True)
class Item:
    """What one text gave.

    Args:
        input: the text that was read; of tagged text its words with spaces between.
        output: what was generated or predicted.
        references: what it should be; any of them counts.
    """

    input: str
    output: str
    references: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The figures of one part of the data.

    Args:
        scores: by name of metric.
        counted: what the scores were computed from, to be held against another network's.
        groups: by name of metric, then of group.
        items: what was generated or predicted, in the order of the data; empty where only likelihood was
            asked for.
    """

    scores: Mapping[str, Score]
    counted: Mapping[str, Counted] = dataclasses.field(compare=False)
    groups: Mapping[str, Mapping[str, Score]]
    items: Sequence[Item]


@dataclasses.dataclass(frozen=True, eq=False)
class Settings:
    """How to evaluate.

    Args:
        metrics: names; None: those that fit the data.
        search: how outputs are found; None: greedily.
        max_new_tokens: the longest output; None: see `isoform.generation.texts.TextGenerator`.
        batch_size: texts generated at a time.
        pool_references: records with the same source are one item, and all their targets references of it.
        group: from a record to the name of its group, e.g. the language pair; None: no groups.
        bootstrap: ask for confidence intervals.
    """

    metrics: Sequence[str] | None = None
    search: Search | None = None
    max_new_tokens: int | None = None
    batch_size: int = 64
    pool_references: bool = False
    group: Callable[[Any], str] | None = None
    bootstrap: Bootstrap | None = None


def evaluate(
    bundle: Bundle, part: Part, settings: Settings = Settings(), *, classes: Sequence[str] = ()
) -> Evaluation:
    """Score a network on a part of the data.

    Args:
        bundle: the network with its tokenizers.
        part: the records, and their batches for the likelihood.
        settings: what is asked for.
        classes: names of labels or tags by number.

    Raises:
        ConfigError: a metric that does not fit the data.
        DataError: texts the network cannot read.
    """
    records = part.records
    kind = next(k for k in DEFAULT if issubclass(type(records.items[0]), k))
    names = DEFAULT[kind] if settings.metrics is None else tuple(settings.metrics)
    if kind is Pair and (len(bundle.protocol.start) != 1 or bundle.protocol.forced):
        # Teacher forcing knows one start token; what is forced after it is no part of the targets.
        if settings.metrics is not None and (asked := [name for name in names if name in LIKELIHOOD]):
            raise ConfigError(
                f"{asked[0]}: the protocol starts or forces more than one token before a target"
            )
        names = tuple(name for name in names if name not in LIKELIHOOD)
    known = KNOWN[kind]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"metric {name!r} does not fit {kind.__name__.lower()} data{did_you_mean(name, known)}"
            )
    counted: dict[str, Counted] = {}
    items: list[Item] = []
    keys: list[str] = []
    if kind in (Pair, Prompted) and any(name in GENERATED for name in names):
        items, keys = _generated(bundle, cast("Sequence[Pair | Prompted]", records.items), settings)
        outputs, references = [i.output for i in items], [i.references for i in items]
        counted |= {n: GENERATED[n](outputs, references) for n in names if n in GENERATED}
    if kind in (Labelled, Tagged) and any(name not in LIKELIHOOD for name in names):
        items, keys, found = _predicted(bundle.model, part, classes, settings, names)
        counted |= found
    if any(name in LIKELIHOOD for name in names):
        counted |= _likelihood(bundle.model, part, names)
    scores = {name: counted[name].score(settings.bootstrap) for name in names}
    groups = (
        {} if settings.group is None else {n: counted[n].groups(keys) for n in names if n not in LIKELIHOOD}
    )
    return Evaluation(scores, counted, groups, items)


def _generated(
    bundle: Bundle, records: Sequence[Pair | Prompted], settings: Settings
) -> tuple[list[Item], list[str]]:
    """One item a record, or a distinct source; and the name of its group."""
    places: dict[object, int] = {}
    inputs: list[str] = []
    right: list[list[str]] = []
    keys: list[str] = []
    for number, record in enumerate(records):
        source, target = _sides(record)
        place = places.setdefault(source if settings.pool_references else number, len(inputs))
        if place == len(inputs):
            inputs.append(source)
            right.append([])
            keys.append("" if settings.group is None else settings.group(record))
        right[place].append(target)
    writer = TextGenerator(
        bundle,
        search=settings.search,
        max_new_tokens=settings.max_new_tokens,
        batch_size=settings.batch_size,
    )
    outputs = [found[0].text for found in writer.write(inputs, progress="generating")]
    items = [
        Item(source, output, tuple(dict.fromkeys(targets)))
        for source, output, targets in zip(inputs, outputs, right, strict=True)
    ]
    return items, keys


def _sides(record: Pair | Prompted) -> tuple[str, str]:
    return (record.source, record.target) if isinstance(record, Pair) else (record.prompt, record.answer)


def _predicted(
    model: Transformer, part: Part, classes: Sequence[str], settings: Settings, names: Sequence[str]
) -> tuple[list[Item], list[str], dict[str, Counted]]:
    """The best label of each text, or tag of each word, in the order of the records."""
    if not classes:
        raise DataError("the names of the labels are not known: the artifact does not say them; give classes")
    names_of = dict(enumerate(classes))
    found: dict[int, tuple[list[str], list[str]]] = {}
    training = model.training
    model.eval()
    try:
        for batch in _bar(part, "predicting"):
            assert isinstance(batch, LabelledBatch)
            for row, guess, gold, use in zip(*_best(model, batch), strict=True):
                pairs = [(g, t) for g, t, used in zip(guess, gold, use, strict=True) if used]
                found[row] = [names_of[g] for g, _ in pairs], [names_of[t] for _, t in pairs]
    finally:
        model.train(training)
    rows = sorted(found)
    records = part.records.items
    guesses, golds = [found[row][0] for row in rows], [found[row][1] for row in rows]
    if isinstance(records[0], Labelled):
        flat = [g[0] for g in guesses], [g[0] for g in golds]
        counted = {n: LABELS[n](*flat) for n in names if n in LABELS}
    else:
        counted = {n: TAGS[n](guesses, golds) for n in names if n in TAGS}
    items = [
        Item(_text(records[row]), " ".join(guess), (" ".join(gold),))
        for row, guess, gold in zip(rows, guesses, golds, strict=True)
    ]
    keys = ["" if settings.group is None else settings.group(records[row]) for row in rows]
    return items, keys, counted


@torch.inference_mode()
def _best(model: Transformer, batch: LabelledBatch) -> tuple[list[int], Any, Any, Any]:
    device = model.embedding.weight.device
    moved = batch.to(device)
    with exact_products(device):
        logits = model(moved.tokens).logits
    if logits is None:
        raise ConfigError("the network has no head that gives labels")
    best, gold, use = logits.argmax(-1), moved.labels, moved.supervised
    if best.dim() == 1:
        best, gold, use = best[:, None], gold[:, None], use[:, None]
    return batch.rows.tolist(), best.tolist(), gold.tolist(), use.tolist()


def _likelihood(model: Transformer, part: Part, names: Sequence[str]) -> dict[str, Counted]:
    records = part.records.items
    said: dict[int, str] = {}
    if isinstance(records[0], Pair | Prompted | Document) and (part.fit is None or not part.fit.truncated):
        kept = range(len(records)) if part.fit is None else part.fit.kept.tolist()
        said = {row: _said(records[row]) for row in kept}
    batches = _bar(part, "scoring")
    if said and isinstance(records[0], Document):
        first = next(iter(part.batches.epoch(0)))
        said = {} if isinstance(first, LabelledBatch) else said  # masked tokens are but a part of the text
    found = likelihood.row_likelihoods(model, batches)
    counted = {"nll": likelihood.nll(found, said.values() or None)} if "nll" in names else {}
    if "bits_per_byte" in names:
        if not said.keys() >= set(found.rows):
            raise ConfigError(
                "bits_per_byte needs rows that predict a whole text each: nll says it of a stream"
            )
        counted["bits_per_byte"] = likelihood.bits_per_byte(found, said)
    return counted


def _said(record: Record) -> str:
    """The text that is predicted."""
    return record.text if isinstance(record, Document) else _sides(cast("Pair | Prompted", record))[1]


def _text(record: Record) -> str:
    return record.text if isinstance(record, Labelled | Document) else " ".join(cast("Tagged", record).words)


def _bar(part: Part, what: str) -> Iterator[Batch | LabelledBatch]:
    return track(part.batches.epoch(0), total=part.batches.count(0), what=what)
