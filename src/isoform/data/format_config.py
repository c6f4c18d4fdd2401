"""The run file's words for how the files of a corpus are written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from isoform.config.base import Frozen

Column = Annotated[int, Field(ge=1)]


class TwoFiles(Frozen):
    """One file a side, line by line; paths are then given as ``{source = …, target = …}``."""

    kind: Literal["lines"] = "lines"


class Tsv(Frozen):
    """Tab-separated columns, numbered from 1; no quoting."""

    kind: Literal["tsv"] = "tsv"
    source: Column
    """Column of the source."""
    target: Column
    """Column of the target."""


class Jsonl(Frozen):
    """One JSON object a line; names of the two fields, which hold strings."""

    kind: Literal["jsonl"] = "jsonl"
    source: str
    """Field of the source."""
    target: str
    """Field of the target."""


class Tmx(Frozen):
    """Translation memory; the two ``xml:lang`` codes, e.g. ``"en"``, which also matches ``"en-GB"``."""

    kind: Literal["tmx"] = "tmx"
    source: str
    """Language of the source."""
    target: str
    """Language of the target."""


class Columns(Frozen):
    """Two columns of strings, of a parquet file or of a folder that `datasets.Dataset.save_to_disk` wrote."""

    kind: Literal["parquet", "dataset"]
    """Which of the two."""
    source: str
    """Column of the source."""
    target: str
    """Column of the target."""


class LabelTsv(Frozen):
    """Tab-separated text and label; columns from 1."""

    kind: Literal["tsv"] = "tsv"
    text: Column
    """Column of the text."""
    label: Column
    """Column of the label."""


class LabelJsonl(Frozen):
    """One JSON object a line with a text and a label, both strings."""

    kind: Literal["jsonl"] = "jsonl"
    text: str
    """Field of the text."""
    label: str
    """Field of the label."""


class LabelColumns(Frozen):
    """As `Columns`, for a text and a label."""

    kind: Literal["parquet", "dataset"]
    """Which of the two."""
    text: str
    """Column of the text."""
    label: str
    """Column of the label."""


class Conll(Frozen):
    """One word a line, blank line between sentences; whitespace-separated columns from 1."""

    kind: Literal["conll"] = "conll"
    word: Column
    """Column of the word."""
    tag: Column
    """Column of the tag."""


class TagJsonl(Frozen):
    """One JSON object a line with two lists of strings of equal length."""

    kind: Literal["jsonl"] = "jsonl"
    words: str
    """Field of the words."""
    tags: str
    """Field of the tags."""


class Sides(Frozen):
    """The two files of parallel lines."""

    source: Path
    """File of the sources."""
    target: Path
    """File of the targets, line for line."""
