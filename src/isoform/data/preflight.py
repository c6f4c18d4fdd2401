"""What can be known about the data before the first step: counts, faults, lengths, leaks."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from typing import Any

import numpy as np

from isoform.data.batching import BucketReport
from isoform.data.config import Empty, OverLong
from isoform.data.corpus import empty_records
from isoform.data.ragged import Ints, Ragged
from isoform.data.records import Pair, Prompted, Record, Records, columns, labels
from isoform.data.store import Contents
from isoform.data.tokenizer import Tokenizer

SHOWN = 10  # places listed of each fault
BINS = 12
SAMPLES = 3
UNKNOWN_RATE = 0.01  # above it, a remark


@dataclasses.dataclass(frozen=True)
class SideReport:
    """The tokens of one side of the records, without specials.

    Attributes:
        tokens: how many.
        unknown: how many of them are the unknown token.
        lengths: minimum, mean, median, 95th percentile and maximum of tokens a record.
        histogram: ``(from, to, records)``, both bounds included.
    """

    tokens: int
    unknown: int
    lengths: dict[str, float]
    histogram: tuple[tuple[int, int, int], ...]

    @property
    def unknown_rate(self) -> float:
        """Unknown tokens as a share of all."""
        return self.unknown / self.tokens if self.tokens else 0.0


@dataclasses.dataclass(frozen=True)
class PartReport:
    """One part of the data.

    Attributes:
        files: where it was read from.
        records: how many, faulty ones included.
        empty: how many have an empty side; the first few places.
        over_long: how many are over a limit; the first few places.
        sides: the tokens of each side.
        classes: how often each label stands, for labelled and tagged text.
        same_records: how many records also stand in the training part; the first few places.
        same_sources: how many have a source (prompt, text) that stands in the training part.
        batches: how well the batches are filled, where batches were made.
    """

    files: tuple[str, ...]
    records: int
    empty: Places
    over_long: Places
    sides: dict[str, SideReport]
    classes: dict[str, int]
    same_records: Places
    same_sources: int
    batches: BucketReport | None


@dataclasses.dataclass(frozen=True)
class Places:
    """How many, and the first few of them."""

    count: int
    first: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Sample:
    """A record as the model sees it: for each side the text, the tokens and the ids."""

    where: str
    sides: dict[str, tuple[str, tuple[str, ...], tuple[int, ...]]]


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits on tokens (specials included), and the policies for records that break them."""

    sides: Mapping[str, int | None]
    over_long: OverLong
    empty: Empty


@dataclasses.dataclass(frozen=True)
class Preflight:
    """The whole report. ``problems`` stop a run; ``remarks`` do not."""

    parts: dict[str, PartReport]
    samples: tuple[Sample, ...]
    problems: tuple[str, ...]
    remarks: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Nothing stops a run."""
        return not self.problems

    def with_batches(self, reports: Mapping[str, BucketReport]) -> Preflight:
        """The same report, with how well the batches of its parts are filled."""
        parts = {
            name: dataclasses.replace(part, batches=reports.get(name, part.batches))
            for name, part in self.parts.items()
        }
        return dataclasses.replace(self, parts=parts)

    def with_stored(self, state: Contents, looked_at: int) -> Preflight:
        """The same report, where only the first records of the training part were looked at closely.

        Args:
            state: what the store says of all of them.
            looked_at: how many the report is about.
        """
        train = dataclasses.replace(self.parts["train"], records=state.records + state.empty)
        tokens = ", ".join(f"{count:,} {side}" for side, count in state.tokens.items())
        said = (
            f"train: kept as ids on disk: {state.rows:,} rows, ids: {tokens}; {state.empty:,} empty and"
            f" {state.dropped:,} over-long records left out, {state.truncated:,} cut; lengths and"
            f" samples are those of the first {looked_at:,}"
        )
        return dataclasses.replace(self, parts={**self.parts, "train": train}, remarks=(*self.remarks, said))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "ok": self.ok,
            "problems": list(self.problems),
            "remarks": list(self.remarks),
            "parts": {name: _part_dict(part) for name, part in self.parts.items()},
            "samples": [
                {
                    "where": sample.where,
                    "sides": {
                        name: {"text": text, "tokens": list(tokens), "ids": list(ids)}
                        for name, (text, tokens, ids) in sample.sides.items()
                    },
                }
                for sample in self.samples
            ],
        }


def examine(
    parts: Mapping[str, Records[Record]],
    ids: Mapping[str, Mapping[str, Ragged]],
    tokenizers: Mapping[str, Tokenizer],
    limits: Limits,
    training: tuple[Container[object], Container[object]] | None = None,
    classes: Mapping[str, int] | None = None,
) -> Preflight:
    """Examine the parts of the data; nothing is raised for what is wrong with a record.

    Args:
        parts: records by part, as read, empty ones included; ``"train"`` is required.
        ids: what `isoform.data.encode.encode_sides` made of each part.
        tokenizers: by side: ``source`` and ``target``, ``prompt`` and ``answer``, or ``text``.
        limits: on ``source`` and ``target``, on ``"prompt and answer"``, or on ``text``.
        training: all training records and their sources, where ``"train"`` holds only some of them.
        classes: how often each label stands in all of them, there.
    """
    train = parts["train"]
    if training is None:
        rows = list(zip(*columns(train.items).values(), strict=True)) if len(parts) > 1 else []
        training = set(rows), {row[0] for row in rows}
    reports: dict[str, PartReport] = {}
    problems: list[str] = []
    remarks: list[str] = []
    for name, records in parts.items():
        seen = training if name != "train" else (set[tuple[str, ...]](), set[str]())
        report = _examine(records, ids[name], tokenizers, limits, seen)
        if name == "train" and classes is not None:
            report = dataclasses.replace(report, classes=dict(classes))
        reports[name] = report
        _judge(name, report, reports["train"], limits, problems, remarks)
    if "validation" not in parts:
        remarks.append("no validation part: neither the checkpoint nor the stop can be chosen by it")
    picks = np.unique(np.linspace(0, len(train) - 1, SAMPLES).astype(int))
    samples = tuple(_sample(train, int(i), tokenizers) for i in picks)
    return Preflight(reports, samples, tuple(problems), tuple(remarks))


def _examine(
    records: Records[Record],
    encoded: Mapping[str, Ragged],
    tokenizers: Mapping[str, Tokenizer],
    limits: Limits,
    training: tuple[Container[object], Container[object]],
) -> PartReport:
    texts = list(zip(*columns(records.items).values(), strict=True))
    measured = _measured(records, encoded, tokenizers)
    over = [
        (int(i), f"{records.where(int(i))}: {name} of {int(lengths[i])} tokens, the limit is {limit}")
        for name, lengths in measured.items()
        for limit in (limits.sides.get(name),)
        if limit is not None
        for i in np.flatnonzero(lengths > limit)
    ]
    same = [i for i, text in enumerate(texts) if text in training[0]]
    return PartReport(
        files=tuple(str(file) for file in records.files),
        records=len(records),
        empty=_places(records, empty_records(records)),
        over_long=Places(len({i for i, _ in over}), tuple(place for _, place in over[:SHOWN])),
        sides={name: _side(ragged, tokenizers[name].special.unk) for name, ragged in encoded.items()},
        classes=dict(sorted(labels(records.items).items())),
        same_records=_places(records, same),
        same_sources=sum(text[0] in training[1] for text in texts),
        batches=None,
    )


def _measured(
    records: Records[Record], encoded: Mapping[str, Ragged], tokenizers: Mapping[str, Tokenizer]
) -> dict[str, Ints]:
    """Lengths as the limits count them, with the specials that training adds."""
    sizes = {name: ragged.lengths for name, ragged in encoded.items()}
    first = records.items[0]
    if isinstance(first, Pair):
        return {"source": sizes["source"] + len(tokenizers["source"].template), "target": sizes["target"] + 1}
    if isinstance(first, Prompted):
        specials = len(tokenizers["prompt"].template) + 1
        return {"prompt and answer": sizes["prompt"] + sizes["answer"] + specials}
    return {"text": sizes["text"] + len(tokenizers["text"].template)}


def _side(ragged: Ragged, unk: int | None) -> SideReport:
    lengths = ragged.lengths
    low, high = int(lengths.min()), int(lengths.max())
    width = -(-(high - low + 1) // BINS)
    edges = np.arange(low, high + width + 1, width)
    counts, _ = np.histogram(lengths, bins=edges)
    bars = zip(edges[:-1].tolist(), (edges[1:] - 1).tolist(), counts.tolist(), strict=True)
    summary = {
        "min": float(low),
        "mean": float(lengths.mean()),
        "median": float(np.median(lengths)),
        "p95": float(np.percentile(lengths, 95)),
        "max": float(high),
    }
    unknown = 0 if unk is None else int((ragged.flat == unk).sum())
    return SideReport(int(lengths.sum()), unknown, summary, tuple(bars))


def _judge(
    name: str,
    report: PartReport,
    train: PartReport,
    limits: Limits,
    problems: list[str],
    remarks: list[str],
) -> None:
    if report.empty.count:
        line = f"{name}: {_records(report.empty.count)} without one side, the first: {report.empty.first[0]}"
        (problems if limits.empty == "error" else remarks).append(f"{line} (empty = {limits.empty!r})")
    if report.over_long.count:
        line = f"{name}: {_records(report.over_long.count)} over-long, the first: {report.over_long.first[0]}"
        (problems if limits.over_long == "error" else remarks).append(
            f"{line} (over_long = {limits.over_long!r})"
        )
    for side, tokens in report.sides.items():
        if tokens.unknown_rate > UNKNOWN_RATE:
            remarks.append(f"{name}: {tokens.unknown_rate:.1%} of the {side} tokens are unknown")
    foreign = sorted(set(report.classes) - set(train.classes))
    if foreign:
        problems.append(f"{name}: label {foreign[0]!r} does not occur in train")
    if report.same_records.count:
        remarks.append(
            f"{name}: {report.same_records.count} of {report.records} records also stand in train, the first:"
            f" {report.same_records.first[0]}; what is measured on them is memory"
        )
    elif report.same_sources:
        remarks.append(
            f"{name}: the source of {report.same_sources} of {report.records} records also stands in train"
        )


def _places(records: Records[Record], indices: list[int]) -> Places:
    return Places(len(indices), tuple(records.where(i) for i in indices[:SHOWN]))


def _sample(records: Records[Record], index: int, tokenizers: Mapping[str, Tokenizer]) -> Sample:
    shown: dict[str, tuple[str, tuple[str, ...], tuple[int, ...]]] = {}
    for name, texts in columns([records.items[index]]).items():
        text = texts[0][:200]  # a stream is one long record
        ids = tokenizers[name].encode(text)
        shown[name] = text, tuple(tokenizers[name].shown(i) for i in ids), tuple(ids)
    return Sample(records.where(index), shown)


def _part_dict(part: PartReport) -> dict[str, Any]:
    return {
        **dataclasses.asdict(part),
        "sides": {
            name: {**dataclasses.asdict(side), "unknown_rate": side.unknown_rate}
            for name, side in part.sides.items()
        },
        "batches": None if part.batches is None else part.batches.to_dict(),
    }


def _records(count: int) -> str:
    return "1 record is" if count == 1 else f"{count} records are"
