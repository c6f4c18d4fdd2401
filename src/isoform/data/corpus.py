"""From the run file's data section to records: one part at a time, so that the test is read last (R35)."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from isoform.data import readers
from isoform.data.config import DatesData, FileData, LabelledData, PrefixData, Split, TaggedData, TextData
from isoform.data.format_config import Columns, Conll, Jsonl, LabelColumns, LabelTsv, Sides, Tmx, Tsv
from isoform.data.records import Document, Pair, Prompted, Record, Records, columns
from isoform.data.tables import read_table
from isoform.data.tmx import read_tmx
from isoform.errors import DataError

PartName = Literal["train", "validation", "test"]
PARTS: tuple[PartName, ...] = ("train", "validation", "test")


def read_part(config: FileData | DatesData, part: PartName, base: Path) -> Records[Record] | None:
    """Read one part of the data and apply the policy for empty records.

    Args:
        config: the run file's data section.
        part: ``"train"``, ``"validation"`` or ``"test"``.
        base: the folder that relative paths start from: the run file's.

    Returns:
        The records; None when the configuration names no such part.

    Raises:
        DataError: as `read_raw`; and a record with an empty side where the configuration does not say
            ``"drop"``.
    """
    records = read_raw(config, part, base)
    return records if records is None or isinstance(config, DatesData) else without_empty(records, config)


def read_raw(config: FileData | DatesData, part: PartName, base: Path) -> Records[Record] | None:
    """As `read_part`, empty records included.

    Raises:
        DataError: a file that is missing, empty, not in its encoding, or malformed (with the line), or no
            record at all.
    """
    if isinstance(config, DatesData):
        from isoform.data.dates import corpus_from

        return corpus_from(config).part(part)
    if config.split is not None:
        return _split_part(config, config.split, part, base)
    path = {"train": config.train, "validation": config.validation, "test": config.test}[part]
    return None if path is None else _read(config, path, part, base)


def _split_part(config: FileData, split: Split, part: PartName, base: Path) -> Records[Record] | None:
    if {"train": 1.0, "validation": split.validation, "test": split.test}[part] == 0:
        return None
    whole = _read(config, config.train, part, base)
    if isinstance(config, TextData) and config.documents == "stream":
        text = _cut(whole.items[0], split)[PARTS.index(part)]
        found: Records[Record] = Records(part, [Document(text)], whole.lines, whole.files)
    else:
        found = whole.select(_assign(whole.items, split)[PARTS.index(part)], part)
    if not len(found) or (isinstance(config, TextData) and found.items[0] == Document("")):
        raise DataError(f"{whole.where(0)}: too little data for the split: {part} gets nothing")
    return found


def _cut(document: Record, split: Split) -> tuple[str, str, str]:
    """Training, validation and test in the order of the text, by characters."""
    assert isinstance(document, Document)
    count = len(document.text)
    first, second = round(count * (1 - split.validation - split.test)), round(count * (1 - split.test))
    return document.text[:first], document.text[first:second], document.text[second:]


def _assign(items: Sequence[Record], split: Split) -> tuple[list[int], list[int], list[int]]:
    """Indices of each part. In random order whole groups of equal sources are dealt out, so that no
    source text of the validation or test is trained on."""
    import numpy as np

    if split.order == "contiguous":
        groups = np.arange(len(items))
    else:
        numbers: dict[str, int] = {}
        first = next(iter(columns(items).values()))
        keys = np.array([numbers.setdefault(text, len(numbers)) for text in first])
        assert split.seed is not None
        groups = np.random.default_rng(split.seed).permutation(len(numbers))[keys]
    count = int(groups.max()) + 1
    first, second = round(count * (1 - split.validation - split.test)), round(count * (1 - split.test))
    part = np.digitize(groups, [first, second])
    train, validation, test = (np.flatnonzero(part == i).tolist() for i in range(3))
    return train, validation, test


def _read(config: FileData, path: Sides | Path, part: str, base: Path) -> Records[Record]:
    files = tuple(
        base / file for file in ((path.source, path.target) if isinstance(path, Sides) else (path,))
    )
    for file in files:
        if glob.has_magic(file.name) and not file.exists():
            raise DataError(f"{file}: no such file; a pattern is for data.train with a data.store")
    numbered = list(rows(config, files))
    if not numbered:
        raise DataError(f"{files[0]}: no records in the file")
    return Records(part, [item for _, item in numbered], [number for number, _ in numbered], files)


def rows(config: FileData, files: tuple[Path, ...]) -> Iterator[tuple[int, Record]]:
    """The records of one file, or of two files of parallel lines, one at a time, with their line numbers."""
    path, encoding = files[0], config.encoding
    if isinstance(config, TextData):
        if config.documents == "stream":
            yield 1, readers.read_stream(path, encoding)
        elif config.documents == "lines":
            yield from readers.read_documents(path, encoding)
        else:
            assert config.field is not None
            if config.documents == "jsonl":
                yield from readers.read_json_documents(path, config.field, encoding)
            else:
                for number, (text,) in read_table(config.documents, path, (config.field,)):
                    yield number, Document(text)
    elif isinstance(config, LabelledData):
        form = config.format
        if isinstance(form, LabelTsv):
            rows = readers.read_tsv(path, (form.text, form.label), encoding)
        elif isinstance(form, LabelColumns):
            rows = read_table(form.kind, path, (form.text, form.label))
        else:
            rows = readers.read_jsonl(path, (form.text, form.label), encoding)
        yield from readers.labelled(rows, path)
    elif isinstance(config, TaggedData):
        form = config.format
        if isinstance(form, Conll):
            yield from readers.read_conll(path, form.word, form.tag, encoding)
        else:
            yield from readers.read_tagged_jsonl(path, form.words, form.tags, encoding)
    elif isinstance(config, PrefixData):
        for number, pair in _pairs(config.format, files, encoding):
            yield number, Prompted(pair.source, pair.target)
    else:
        yield from _pairs(config.format, files, encoding)


def _pairs(
    form: Tsv | Jsonl | Columns | Tmx | object, files: tuple[Path, ...], encoding: str
) -> Iterator[tuple[int, Pair]]:
    if isinstance(form, Tsv):
        rows = readers.read_tsv(files[0], (form.source, form.target), encoding)
    elif isinstance(form, Jsonl):
        rows = readers.read_jsonl(files[0], (form.source, form.target), encoding)
    elif isinstance(form, Columns):
        rows = read_table(form.kind, files[0], (form.source, form.target))
    elif isinstance(form, Tmx):
        yield from read_tmx(files[0], form.source, form.target)
        return
    else:
        yield from readers.read_parallel_lines(files[0], files[1], encoding)
        return
    for number, (source, target) in rows:
        yield number, Pair(source, target)


def without_empty(records: Records[Record], config: FileData) -> Records[Record]:
    """Apply the policy for records one side of which is empty or blank.

    Raises:
        DataError: there is one and the policy is ``"error"``, or nothing is left.
    """
    kept = not_empty(records, config)
    return records if len(kept) == len(records) else records.select(kept, records.name)


def not_empty(records: Records[Record], config: FileData) -> list[int]:
    """Indices of the records that `without_empty` keeps."""
    stream = isinstance(config, TextData) and config.documents == "stream"
    bad = [] if stream else empty_records(records)
    if bad and config.empty == "error":
        side = next(n for n, texts in columns(records.items).items() if not texts[bad[0]].strip())
        raise DataError(
            f"{records.where(bad[0])}: the {side} is empty ({len(bad)} such in {records.name});"
            ' correct the file or set empty = "drop"'
        )
    kept = sorted(set(range(len(records))) - set(bad))
    if not kept:
        raise DataError(f"{records.where(0)}: every record of {records.name} is empty")
    return kept


def empty_records(records: Records[Record]) -> list[int]:
    """Indices of the records one side of which is empty or blank."""
    texts = columns(records.items).values()
    return sorted({i for column in texts for i, text in enumerate(column) if not text or text.isspace()})
