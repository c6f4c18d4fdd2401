"""The whole way from the run file's sections to batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from isoform.data import encode, labelling, sequences, streaming
from isoform.data.batching import Batch, Batches, LabelledBatch
from isoform.data.batching_config import BatchingConfig, Masking, Packed, TokenBudget, Windows
from isoform.data.config import (
    DataConfig,
    DatesData,
    LabelledData,
    ParallelData,
    PrefixData,
    TaggedData,
    TextData,
)
from isoform.data.corpus import PARTS, PartName, not_empty, read_raw
from isoform.data.encode import EncodedTexts
from isoform.data.fit import Fit
from isoform.data.preflight import Limits, Preflight, examine
from isoform.data.ragged import Ragged
from isoform.data.records import Document, Labelled, Pair, Prompted, Record, Records, Tagged, columns
from isoform.data.store import Stored
from isoform.data.tokenizer import Tokenizer
from isoform.data.tokenizer_config import TokenizersConfig
from isoform.data.vocabularies import Tokenizers, build_tokenizers
from isoform.data.windows import RandomWindows, SequentialWindows
from isoform.errors import ConfigError, DataError

EVALUATION_MASK_SEED = 0  # the same masks at every evaluation of every run


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of the data, ready to be read.

    Attributes:
        records: the records, after the policy for empty ones.
        batches: in training order for ``train``, in a fixed order for the others.
        fit: what the limits on length did; None for a stream.
        stored: the ids on disk, where the part is too large for memory: then ``records`` are the first only.
    """

    records: Records[Record]
    batches: Batches[Batch] | Batches[LabelledBatch]
    fit: Fit | None
    stored: Stored | None = None

    @property
    def where(self) -> Callable[[int], str]:
        """The place that the row of a batch was read from."""
        if self.fit is None:
            return lambda row: f"{self._record(0)}, window at token {row}"
        return self._record

    def _record(self, record: int) -> str:
        return self.records.where(record) if self.stored is None else self.stored.where(record)


@dataclasses.dataclass(frozen=True)
class Task:
    """How records become batches: all that `Prepared` needs to prepare another part.

    Attributes:
        data: the run file's data section.
        batching: its batching section.
        base: the folder that relative paths start from.
        seed: orders the training batches.
        start_id: what the decoder reads first; None takes the target's bos.
        masking: for masked-token training.
    """

    data: DataConfig
    batching: BatchingConfig
    base: Path
    seed: int
    start_id: int | None = None
    masking: Masking | None = None


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Training and validation, ready; the test is read when asked for (R35)."""

    task: Task
    tokenizers: Tokenizers
    classes: dict[str, int]
    preflight: Preflight
    train: Part
    validation: Part | None

    def test(self) -> Part | None:
        """Read and prepare the test part."""
        records = read_raw(self.task.data, "test", self.task.base)
        if records is None:
            return None
        ids = encode.encode_sides(records, _by_side(records, self.tokenizers))
        return prepare_part(self.task, records, ids, self.tokenizers, self.classes)


def prepare(task: Task, tokenizers: TokenizersConfig | Tokenizers) -> Prepared:
    """Read, tokenize, check and batch.

    Args:
        task: what to read and how to batch it.
        tokenizers: how to make the tokenizers from the training part, or those made before.

    Raises:
        DataError: a file, a record or a limit that the configuration does not allow for.
        TokenizerError: a tokenizer that cannot be made or lacks a token that the task needs.
        ConfigError: sections that do not go together.
    """
    checked = check(task, tokenizers)
    report, made = checked.preflight, checked.tokenizers
    if report.problems:
        raise DataError(report.problems[0])
    classes = encode.classes_of([*report.parts["train"].classes])

    def part(name: PartName) -> Part:
        if name == "train" and checked.stored is not None:
            return stored_part(task, checked.parts[name], checked.stored, made)
        return prepare_part(task, checked.parts[name], checked.ids[name], made, classes)

    train, validation = part("train"), part("validation") if "validation" in checked.parts else None
    filled = {"train": train.batches.report(0)}
    if validation is not None:
        filled["validation"] = validation.batches.report(0)
    return Prepared(task, made, classes, report.with_batches(filled), train, validation)


@dataclasses.dataclass(frozen=True)
class Checked:
    """The preflight and what it looked at: records as read, and their ids, by part and side."""

    preflight: Preflight
    tokenizers: Tokenizers
    parts: dict[str, Records[Record]]
    ids: dict[str, dict[str, Ragged]]
    stored: Stored | None = None


def check(task: Task, tokenizers: TokenizersConfig | Tokenizers) -> Checked:
    """The preflight alone. The test part is looked at for leaks and faults, never scored.

    Raises:
        DataError: a file that cannot be read as asked; faults of single records are in the report.
        TokenizerError: a tokenizer that cannot be made.
        ConfigError: sections that do not go together.
    """
    _refuse_misfit(task)
    parts = {name: records for name in PARTS if (records := _raw(task, name)) is not None}
    if isinstance(tokenizers, TokenizersConfig):
        tokenizers = build_tokenizers(tokenizers, task.data, parts["train"], task.base, task.masking)
    by_side = _by_side(parts["train"], tokenizers)
    ids = {name: encode.encode_sides(records, by_side) for name, records in parts.items()}
    if streaming.streamed(task.data) is None:
        return Checked(examine(parts, ids, by_side, _limits(task.data)), tokenizers, dict(parts), ids)
    stored = streaming.stored(cast("streaming.Streamed", task.data), tokenizers, task.base)
    seen = stored.seen("records"), stored.seen("sources")
    report = examine(parts, ids, by_side, _limits(task.data), seen, stored.state.classes)
    report = report.with_stored(stored.state, len(parts["train"]))
    return Checked(report, tokenizers, dict(parts), ids, stored)


def _raw(task: Task, name: PartName) -> Records[Record] | None:
    if name == "train" and streaming.streamed(task.data) is not None:
        return streaming.sample(cast("streaming.Streamed", task.data), task.base)
    return read_raw(task.data, name, task.base)


def stored_part(task: Task, records: Records[Record], stored: Stored, tokenizers: Tokenizers) -> Part:
    """The training part's batches, made of ids that stay on disk.

    Args:
        task: how.
        records: the first of them, for messages.
        stored: all of them.
        tokenizers: those that made the ids.
    """
    data, batching, fit = task.data, task.batching, stored.fit()
    source, target = tokenizers.source, tokenizers.target
    pad, where = source.special.pad or 0, stored.where
    common: dict[str, Any] = {"seed": task.seed, "where": where}
    if isinstance(data, ParallelData):
        assert isinstance(batching, TokenBudget)
        pairs = encode.EncodedPairs(stored.rows("source"), stored.rows("target"), fit)
        ends = {"source_pad": pad, "target_pad": target.special.pad or 0}
        found: Any = sequences.pair_batches(
            pairs, start_id=_start(task, target), budget=batching, **ends, **common
        )
        return Part(records, found, fit, stored)
    rows = stored.rows("tokens")
    if isinstance(data, PrefixData):
        assert isinstance(batching, TokenBudget)
        prompts = encode.EncodedPrompts(rows, stored.array("prefix"), fit)
        return Part(
            records, sequences.prompt_batches(prompts, pad=pad, budget=batching, **common), fit, stored
        )
    if isinstance(data, LabelledData | TaggedData):
        assert isinstance(batching, TokenBudget)
        if isinstance(data, LabelledData):
            found = labelling.class_batches(
                encode.EncodedLabels(rows, stored.array("labels"), fit), pad=pad, budget=batching, **common
            )
        else:
            tags = encode.EncodedTags(rows, stored.rows("tags"), fit)
            found = labelling.tag_batches(tags, pad=pad, budget=batching, **common)
        return Part(records, found, fit, stored)
    if isinstance(batching, Windows):
        windows = RandomWindows(rows.flat, windows=batching, seed=task.seed, where=where(0))
        return Part(records, windows, None, stored)
    texts, start = EncodedTexts(rows, fit), _start(task, source)
    if isinstance(batching, Packed):
        found = sequences.PackedDocuments(texts, start_id=start, pad=pad, packing=batching, **common)
    else:
        found = sequences.document_batches(texts, start_id=start, pad=pad, budget=batching, **common)
    return Part(records, found, fit, stored)


def prepare_part(
    task: Task,
    records: Records[Record],
    ids: Mapping[str, Ragged],
    tokenizers: Tokenizers,
    classes: Mapping[str, int],
) -> Part:
    """Apply the policies to records and make their batches: in a seeded order for ``train``.

    Args:
        task: how.
        records: the records as read.
        ids: what `isoform.data.encode.encode_sides` made of them.
        tokenizers: those that made the ids.
        classes: the number of each label.

    Raises:
        DataError: a record that the policies do not allow for, or none is left.
    """
    part = _prepared(task, records, ids, tokenizers, classes)
    if part.fit is not None and not len(part.fit.kept):
        raise DataError(f"{records.where(0)}: every record of {records.name} is over the limit")
    return part


def _prepared(
    task: Task,
    records: Records[Record],
    ids: Mapping[str, Ragged],
    tokenizers: Tokenizers,
    classes: Mapping[str, int],
) -> Part:
    data, batching, source, target = task.data, task.batching, tokenizers.source, tokenizers.target
    name = records.name
    seed = task.seed if name == "train" else None
    if not isinstance(data, DatesData):
        kept = not_empty(records, data)
        if len(kept) < len(records):
            records = records.select(kept, name)
            ids = {side: ragged.select(np.array(kept)) for side, ragged in ids.items()}
    pad, where, items = source.special.pad or 0, records.where, cast(Any, records)
    if isinstance(data, TextData) and data.documents == "stream":
        return _stream_part(task, name, cast("Records[Document]", records), ids["text"].compact(), source)
    assert not isinstance(batching, Windows)
    if isinstance(batching, Packed):
        texts = _documents(data, items, ids, source)
        start = _start(task, source)
        packed = sequences.PackedDocuments(
            texts, start_id=start, pad=pad, packing=batching, seed=seed, where=where
        )
        return Part(records, packed, texts.fit)
    common: dict[str, Any] = {"budget": batching, "seed": seed, "where": where}
    if isinstance(data, ParallelData | DatesData):
        limits = _limits(data)
        pairs = encode.encode_pairs(
            cast("Records[Pair]", records),
            ids,
            source,
            target,
            max_source=limits.sides["source"],
            max_target=limits.sides["target"],
            over_long=limits.over_long,
        )
        return Part(
            records,
            sequences.pair_batches(
                pairs,
                start_id=_start(task, target),
                source_pad=pad,
                target_pad=target.special.pad or 0,
                **common,
            ),
            pairs.fit,
        )
    length: dict[str, Any] = {"max_length": data.max_length, "over_long": data.over_long}
    if isinstance(data, PrefixData):
        prompts = encode.encode_prompted(cast("Records[Prompted]", records), ids, source, **length)
        return Part(records, sequences.prompt_batches(prompts, pad=pad, **common), prompts.fit)
    if isinstance(data, LabelledData):
        labels = encode.encode_labelled(cast("Records[Labelled]", records), ids, source, classes, **length)
        return Part(records, labelling.class_batches(labels, pad=pad, **common), labels.fit)
    if isinstance(data, TaggedData):
        tags = encode.encode_tagged(cast("Records[Tagged]", records), source, classes, **length)
        return Part(records, labelling.tag_batches(tags, pad=pad, **common), tags.fit)
    texts = _documents(data, items, ids, source)
    if task.masking is not None:
        return Part(records, _masked(task, name, texts, source, batching, where), texts.fit)
    start = _start(task, source)
    return Part(records, sequences.document_batches(texts, start_id=start, pad=pad, **common), texts.fit)


def _stream_part(
    task: Task, name: str, records: Records[Document], ids: NDArray[np.int32], tokenizer: Tokenizer
) -> Part:
    assert isinstance(task.batching, Windows)
    ids, windows, where = (
        encode.encode_stream(records.items[0].text, tokenizer),
        task.batching,
        records.where(0),
    )
    if task.masking is not None:
        before, after = tokenizer.template.prefix, tokenizer.template.suffix
        room = windows.length - len(tokenizer.template)
        if room < 1:
            raise ConfigError(f"windows of {windows.length} hold nothing but their special tokens")
        rows = [[*before, *ids[i : i + room].tolist(), *after] for i in range(0, len(ids), room)]
        texts = EncodedTexts(Ragged.from_lists(rows), Fit(np.arange(len(rows)), 0, 0))
        budget = TokenBudget(max_tokens=windows.length * windows.batch_size, pool=max(len(rows), 1))
        batches = _masked(task, name, texts, tokenizer, budget, lambda row: f"{where}, window {row + 1}")
        return Part(records, batches, None)
    if name == "train":
        return Part(records, RandomWindows(ids, windows=windows, seed=task.seed, where=where), None)
    return Part(records, SequentialWindows(ids, windows=windows, where=where), None)


def _masked(
    task: Task,
    name: str,
    texts: EncodedTexts,
    tokenizer: Tokenizer,
    budget: TokenBudget,
    where: Callable[[int], str],
) -> Batches[LabelledBatch]:
    assert task.masking is not None
    return labelling.masked_batches(
        texts,
        tokenizer,
        masking=task.masking,
        pad=tokenizer.special.pad or 0,
        budget=budget,
        seed=task.seed if name == "train" else EVALUATION_MASK_SEED,
        shuffle=name == "train",
        where=where,
    )


def _documents(
    data: DataConfig, records: Records[Document], ids: Mapping[str, Ragged], tokenizer: Tokenizer
) -> EncodedTexts:
    assert isinstance(data, TextData)
    return encode.encode_documents(
        records, ids, tokenizer, max_length=data.max_length, over_long=data.over_long
    )


def _start(task: Task, tokenizer: Tokenizer) -> int:
    return tokenizer.special.require("bos") if task.start_id is None else task.start_id


def _by_side(records: Records[Record], tokenizers: Tokenizers) -> dict[str, Tokenizer]:
    """The first side of a record (source, prompt, text) is the source tokenizer's."""
    names = columns([records.items[0]])
    return dict(zip(names, (tokenizers.source, tokenizers.target), strict=False))


def _limits(data: DataConfig) -> Limits:
    if isinstance(data, DatesData):
        return Limits({"source": None, "target": None}, "error", "error")
    if isinstance(data, ParallelData):
        return Limits({"source": data.max_source, "target": data.max_target}, data.over_long, data.empty)
    name = "prompt and answer" if isinstance(data, PrefixData) else "text"
    return Limits({name: data.max_length}, data.over_long, data.empty)


def _refuse_misfit(task: Task) -> None:
    data, kind = task.data, task.batching.kind
    text = isinstance(data, TextData)
    stream = text and data.documents == "stream"
    if task.masking is not None and streaming.streamed(data) is not None:
        raise ConfigError("data.store: masked-token training reads its texts into memory; leave store out")
    if task.masking is not None and not text:
        raise ConfigError(f'masking needs data of kind "text", not "{data.kind}"')
    allowed = ["windows"] if stream else ["tokens"]
    if text and not stream and task.masking is None:
        allowed.append("packed")
    if kind not in allowed:
        shape = f', documents = "{data.documents}"' if text else ""
        raise ConfigError(
            f'batching of kind "{kind}" does not fit data of kind "{data.kind}"{shape}; expected'
            f" {' or '.join(allowed)}"
        )
