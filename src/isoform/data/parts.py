"""Records or ids on disk to batches: one part of the data, ready to be read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isoform.data import labelling, sequences
from isoform.data.batching import Batch, Batches, LabelledBatch
from isoform.data.batching_config import BatchingConfig, Masking, Packed, TokenBudget, Windows
from isoform.data.config import DataConfig, DatesData, TextData
from isoform.data.corpus import not_empty
from isoform.data.encode import EncodedLabels, EncodedPairs, EncodedPrompts, EncodedTags, EncodedTexts
from isoform.data.fit import Fit
from isoform.data.forms import FORMS, Encoded, encode_records
from isoform.data.ragged import Ragged
from isoform.data.records import Record, Records
from isoform.data.store import Stored
from isoform.data.tokenizer import Tokenizer
from isoform.data.vocabularies import Tokenizers
from isoform.data.windows import RandomWindows, SequentialWindows
from isoform.errors import ConfigError, DataError

EVALUATION_MASK_SEED = 0  # the same masks at every evaluation of every run
AnyBatches = Batches[Batch] | Batches[LabelledBatch]


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
    batches: AnyBatches
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


def stored_part(task: Task, records: Records[Record], stored: Stored, tokenizers: Tokenizers) -> Part:
    """The training part's batches, made of ids that stay on disk.

    Args:
        task: how.
        records: the first of them, for messages.
        stored: all of them.
        tokenizers: those that made the ids.
    """
    form, where = FORMS[type(task.data)], stored.where
    sides = [stored.rows(name) for name in form.sides]
    if isinstance(task.batching, Windows):
        windows = RandomWindows(sides[0].flat, windows=task.batching, seed=task.seed, where=where(0))
        return Part(records, windows, None, stored)
    fit = stored.fit()
    encoded = form.kind(*sides, *(stored.array(name) for name in form.numbers), fit)
    return Part(records, _batches(task, encoded, tokenizers, task.seed, where), fit, stored)


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
    data, name = task.data, records.name
    if not isinstance(data, DatesData):
        kept = not_empty(records, data)
        if len(kept) < len(records):
            records = records.select(kept, name)
            ids = {side: ragged.select(np.array(kept)) for side, ragged in ids.items()}
    where = records.where
    if isinstance(data, TextData) and data.documents == "stream":
        batches = _stream_batches(task, name, ids["text"].compact(), tokenizers.source, where(0))
        return Part(records, batches, None)
    encoded = encode_records(data, records, ids, tokenizers, classes)
    if not len(encoded.fit.kept):
        raise DataError(f"{where(0)}: every record of {name} is over the limit")
    batches = _batches(task, encoded, tokenizers, task.seed if name == "train" else None, where)
    return Part(records, batches, encoded.fit)


def _batches(
    task: Task, encoded: Encoded, tokenizers: Tokenizers, seed: int | None, where: Callable[[int], str]
) -> AnyBatches:
    """Batches in an order that the seed decides; None: in one of their own, for evaluation."""
    source, target, batching = tokenizers.source, tokenizers.target, task.batching
    common: dict[str, Any] = {"pad": source.special.pad or 0, "seed": seed, "where": where}
    if isinstance(batching, Packed):
        assert isinstance(encoded, EncodedTexts)
        start = _start(task, source)
        return sequences.PackedDocuments(encoded, start_id=start, packing=batching, **common)
    assert isinstance(batching, TokenBudget)
    if isinstance(encoded, EncodedPairs):
        return sequences.pair_batches(
            encoded,
            start_id=_start(task, target),
            source_pad=common["pad"],
            target_pad=target.special.pad or 0,
            budget=batching,
            seed=seed,
            where=where,
        )
    common["budget"] = batching
    if isinstance(encoded, EncodedPrompts):
        return sequences.prompt_batches(encoded, **common)
    if isinstance(encoded, EncodedLabels):
        return labelling.class_batches(encoded, **common)
    if isinstance(encoded, EncodedTags):
        return labelling.tag_batches(encoded, **common)
    if task.masking is not None:
        return _masked(task.masking, encoded, source, batching, seed, where)
    return sequences.document_batches(encoded, start_id=_start(task, source), **common)


def _stream_batches(
    task: Task, name: str, ids: NDArray[np.int32], tokenizer: Tokenizer, where: str
) -> AnyBatches:
    windows, seed = task.batching, task.seed if name == "train" else None
    assert isinstance(windows, Windows)
    if task.masking is not None:
        before, after = tokenizer.template.prefix, tokenizer.template.suffix
        room = windows.length - len(tokenizer.template)
        if room < 1:
            raise ConfigError(f"windows of {windows.length} hold nothing but their special tokens")
        rows = [[*before, *ids[i : i + room].tolist(), *after] for i in range(0, len(ids), room)]
        texts = EncodedTexts(Ragged.from_lists(rows), Fit(np.arange(len(rows)), 0, 0))
        budget = TokenBudget(max_tokens=windows.length * windows.batch_size, pool=max(len(rows), 1))
        place = lambda row: f"{where}, window {row + 1}"  # noqa: E731
        return _masked(task.masking, texts, tokenizer, budget, seed, place)
    if seed is not None:
        return RandomWindows(ids, windows=windows, seed=seed, where=where)
    return SequentialWindows(ids, windows=windows, where=where)


def _masked(
    masking: Masking,
    texts: EncodedTexts,
    tokenizer: Tokenizer,
    budget: TokenBudget,
    seed: int | None,
    where: Callable[[int], str],
) -> Batches[LabelledBatch]:
    return labelling.masked_batches(
        texts,
        tokenizer,
        masking=masking,
        pad=tokenizer.special.pad or 0,
        budget=budget,
        seed=EVALUATION_MASK_SEED if seed is None else seed,
        shuffle=seed is not None,
        where=where,
    )


def _start(task: Task, tokenizer: Tokenizer) -> int:
    return tokenizer.special.require("bos") if task.start_id is None else task.start_id
