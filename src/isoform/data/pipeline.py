"""The whole way from the run file's sections to batches."""

from __future__ import annotations

import dataclasses
from typing import cast

from isoform.data import encode, streaming
from isoform.data.config import DataConfig, DatesData, ParallelData, PrefixData, TextData
from isoform.data.corpus import PARTS, PartName, read_raw
from isoform.data.parts import Part, Task, prepare_part, stored_part
from isoform.data.preflight import Limits, Preflight, examine
from isoform.data.ragged import Ragged
from isoform.data.records import Record, Records
from isoform.data.store import Stored
from isoform.data.tokenizer_config import TokenizersConfig
from isoform.data.vocabularies import Tokenizers, build_tokenizers
from isoform.errors import ConfigError, DataError


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
        ids = encode.encode_sides(records, self.tokenizers.by_side(records))
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
    by_side = tokenizers.by_side(parts["train"])
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
