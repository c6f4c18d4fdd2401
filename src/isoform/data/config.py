"""The run file's section on data: which text, in which form, and what to do with bad records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from isoform.config.base import Frozen
from isoform.data.format_config import (
    Columns,
    Conll,
    Jsonl,
    LabelColumns,
    LabelJsonl,
    LabelTsv,
    Sides,
    TagJsonl,
    Tmx,
    Tsv,
    TwoFiles,
)

Limit = Annotated[int, Field(ge=1)] | None
OverLong = Literal["error", "drop", "truncate"]
Empty = Literal["error", "drop"]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


class Split(Frozen):
    """Cuts one file into train, validation and test (R35).

    ``"random"`` deals distinct sources out, so that records with the same source text stay in one part;
    ``"contiguous"`` cuts the file in its own order: training first, then validation, then test.
    """

    validation: Fraction
    """Share of the records that becomes the validation part."""
    test: Fraction = 0.0
    """Share that becomes the test part."""
    order: Literal["random", "contiguous"]
    """How the records are dealt out."""
    seed: int | None = None
    """Of the random order; only there."""

    @model_validator(mode="after")
    def _consistent(self) -> Split:
        if self.validation + self.test >= 1:
            raise ValueError("validation and test together leave nothing to train on")
        if (self.order == "random") != (self.seed is not None):
            raise ValueError('seed belongs to order = "random", which needs it')
        return self


class Store(Frozen):
    """The training part as ids on disk, mapped into memory: for corpora that do not fit into it.

    They are read once, a piece at a time, and never held as a whole. ``train`` may then be a pattern for many
    files (``part-*.jsonl.zst``). Tokenizers are learnt from, and the preflight looks at, the first
    ``sample`` records (of a stream: its first 16 million characters).

    Attributes:
        folder: where the ids are kept; a later run with the same data and tokenizers reads them from there.
        workers: processes that tokenize; 0: this one.
        sample: see above.
    """

    folder: Path
    workers: Annotated[int, Field(ge=0)] = 0
    sample: Annotated[int, Field(ge=1)] = 20_000


class Part(Frozen):
    """What all kinds of data have in common: files, their encoding, and what to do with bad records.

    Attributes:
        encoding: a codec's name; text is decoded strictly.
        empty: what to do with a record one side of which is empty or blank.
        over_long: what to do with a record over the limit. ``"drop"`` and ``"truncate"`` are counted and
            reported; ``"truncate"`` keeps the first tokens and with the cut loses the end-of-sequence.
    """

    encoding: str = "utf-8"
    empty: Empty = "error"
    over_long: OverLong = "error"
    split: Split | None = None
    """Cuts validation and test out of the training file, where they have no files of their own."""


class ParallelData(Part):
    """Source and target texts for an encoder–decoder. Limits count tokens with their specials."""

    kind: Literal["parallel"] = "parallel"
    format: Annotated[TwoFiles | Tsv | Jsonl | Columns | Tmx, Field(discriminator="kind")]
    """How the files are written."""
    train: Sides | Path
    """The training part: a file, or one for each side."""
    validation: Sides | Path | None = None
    """The part that early stopping and the choice of weights judge by (R35)."""
    test: Sides | Path | None = None
    """The part that is read once, at the end."""
    store: Store | None = None
    """Keeps the training part on disk instead of in memory."""
    max_source: Limit = None
    """The most tokens of a source, specials counted."""
    max_target: Limit = None
    """The most tokens of a target, specials counted."""

    @model_validator(mode="after")
    def _consistent(self) -> ParallelData:
        _check_paths(self.format, self.train, self.validation, self.test)
        _check_split(self.split, self.validation, self.test)
        _check_store(self.split, self.store)
        return self


class PrefixData(Part):
    """Prompts and answers for one stack; ``source`` is the prompt, ``target`` the answer (6.33)."""

    kind: Literal["prefix"] = "prefix"
    format: Annotated[TwoFiles | Tsv | Jsonl | Columns, Field(discriminator="kind")]
    """How the files are written."""
    train: Sides | Path
    """The training part: a file, or one for each side."""
    validation: Sides | Path | None = None
    """The part that early stopping and the choice of weights judge by (R35)."""
    test: Sides | Path | None = None
    """The part that is read once, at the end."""
    store: Store | None = None
    """Keeps the training part on disk instead of in memory."""
    max_length: Limit = None
    """The most tokens of a record, specials counted."""

    @model_validator(mode="after")
    def _consistent(self) -> PrefixData:
        _check_paths(self.format, self.train, self.validation, self.test)
        _check_split(self.split, self.validation, self.test)
        _check_store(self.split, self.store)
        return self


class TextData(Part):
    """Plain text for language modelling or masked-token training.

    ``"stream"``: the whole file, line ends included, is one document cut into windows.
    ``"lines"``: each line is a document.
    ``"jsonl"``: ``field`` of the JSON object on each line is a document.
    ``"parquet"``, ``"dataset"``: the column ``field`` of a parquet file, or of a folder that
    `datasets.Dataset.save_to_disk` wrote; each row is a document.
    """

    kind: Literal["text"] = "text"
    documents: Literal["stream", "lines", "jsonl", "parquet", "dataset"]
    """What one document is."""
    field: str | None = None
    """The field, or column, that holds the text."""
    train: Path
    """The training part: a file, or one for each side."""
    validation: Path | None = None
    """The part that early stopping and the choice of weights judge by (R35)."""
    test: Path | None = None
    """The part that is read once, at the end."""
    store: Store | None = None
    """Keeps the training part on disk instead of in memory."""
    max_length: Limit = None
    """The most tokens of a record, specials counted."""

    @model_validator(mode="after")
    def _consistent(self) -> TextData:
        _check_split(self.split, self.validation, self.test)
        _check_store(self.split, self.store)
        if (self.field is None) != (self.documents in ("stream", "lines")):
            raise ValueError('field belongs to documents = "jsonl", "parquet" and "dataset", which need it')
        if self.documents == "stream":
            if self.split is not None and self.split.order != "contiguous":
                raise ValueError('a stream can only be split with order = "contiguous"')
            if self.max_length is not None:
                raise ValueError("max_length limits documents; a stream is cut by the window's length")
        return self


class LabelledData(Part):
    """Text with a label (sequence classification)."""

    kind: Literal["labelled"] = "labelled"
    format: Annotated[LabelTsv | LabelJsonl | LabelColumns, Field(discriminator="kind")]
    """How the files are written."""
    train: Path
    """The training part: a file, or one for each side."""
    validation: Path | None = None
    """The part that early stopping and the choice of weights judge by (R35)."""
    test: Path | None = None
    """The part that is read once, at the end."""
    store: Store | None = None
    """Keeps the training part on disk instead of in memory."""
    max_length: Limit = None
    """The most tokens of a record, specials counted."""

    @model_validator(mode="after")
    def _consistent(self) -> LabelledData:
        _check_split(self.split, self.validation, self.test)
        _check_store(self.split, self.store)
        return self


class TaggedData(Part):
    """Words with a tag each (token tagging)."""

    kind: Literal["tagged"] = "tagged"
    format: Annotated[Conll | TagJsonl, Field(discriminator="kind")]
    """How the files are written."""
    train: Path
    """The training part: a file, or one for each side."""
    validation: Path | None = None
    """The part that early stopping and the choice of weights judge by (R35)."""
    test: Path | None = None
    """The part that is read once, at the end."""
    store: Store | None = None
    """Keeps the training part on disk instead of in memory."""
    max_length: Limit = None
    """The most tokens of a record, specials counted."""

    @model_validator(mode="after")
    def _consistent(self) -> TaggedData:
        _check_split(self.split, self.validation, self.test)
        _check_store(self.split, self.store)
        return self


class DatesData(Frozen):
    """The built-in corpus: calendar dates written out in many languages; see `isoform.data.dates`.

    Attributes:
        seed: fixes which dates belong to which part and which pairs are drawn.
        languages: CLDR codes; None takes `isoform.data.dates.LANGUAGES`.
    """

    kind: Literal["dates"] = "dates"
    seed: int
    train: Annotated[int, Field(ge=1)] = 200_000
    """Pairs in the training part."""
    validation: Annotated[int, Field(ge=1)] = 1_000
    """Pairs in the validation part."""
    test: Annotated[int, Field(ge=1)] = 4_000
    """Pairs in the test part."""
    first_year: Annotated[int, Field(ge=1000)] = 1900
    """The first year that dates are taken from."""
    last_year: Annotated[int, Field(le=9999)] = 2099
    """The last one."""
    languages: tuple[str, ...] | None = None


DataConfig = Annotated[
    ParallelData | PrefixData | TextData | LabelledData | TaggedData | DatesData, Field(discriminator="kind")
]
FileData = ParallelData | PrefixData | TextData | LabelledData | TaggedData


def _check_paths(form: object, *paths: Sides | Path | None) -> None:
    for path in paths:
        if path is not None and isinstance(path, Sides) != isinstance(form, TwoFiles):
            expected = "{source = …, target = …}" if isinstance(form, TwoFiles) else "one path"
            raise ValueError(f'format kind = "{form.kind}" takes {expected} for train, validation and test')  # type: ignore[attr-defined]


def _check_store(split: Split | None, store: Store | None) -> None:
    if split is not None and store is not None:
        raise ValueError("a split needs all records at once: with store, give files for validation and test")


def _check_split(split: Split | None, validation: object, test: object) -> None:
    if split is not None and (validation is not None or test is not None):
        raise ValueError("give either split or files for validation and test")
