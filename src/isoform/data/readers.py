"""Records from lines, tab-separated columns, JSON lines, CoNLL columns and translation memories."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from isoform.data.files import lines, read_text
from isoform.data.records import Document, Labelled, Pair, Tagged
from isoform.errors import DataError

Numbered = tuple[int, tuple[str, ...]]


def read_parallel_lines(source: Path, target: Path, encoding: str) -> Iterator[tuple[int, Pair]]:
    """Line i of one file belongs to line i of the other.

    Raises:
        DataError: the files have unequal numbers of lines.
    """
    left, right = lines(source, encoding), lines(target, encoding)
    number = 0
    for number, (a, b) in enumerate(zip_longest(left, right), 1):
        if a is None or b is None:
            break
        yield number, Pair(a, b)
    else:
        return
    more = number + sum(1 for _ in left) + sum(1 for _ in right)
    counts = (number - 1, more) if a is None else (more, number - 1)
    raise DataError(
        f"{source} has {counts[0]} lines and {target} has {counts[1]}: parallel files need equally many"
    )


def read_tsv(path: Path, columns: Sequence[int], encoding: str) -> Iterator[Numbered]:
    """The given tab-separated columns (from 1) of every line; no quoting.

    Raises:
        DataError: a line has too few columns.
    """
    need = max(columns)
    picks = [column - 1 for column in columns]
    for number, line in enumerate(lines(path, encoding), 1):
        cells = line.split("\t")
        if len(cells) < need:
            raise DataError(
                f"{path}, line {number}: {len(cells)} tab-separated columns, column {need} is asked for"
            )
        yield number, tuple(cells[pick] for pick in picks)


def read_json_objects(
    path: Path, fields: Sequence[str], encoding: str
) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """The given fields of one JSON object a line; blank lines are passed over.

    Raises:
        DataError: a line is not a JSON object or lacks a field.
    """
    for number, line in enumerate(lines(path, encoding), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}: not JSON: {error.msg} at column {error.colno}") from None
        except (ValueError, RecursionError) as error:  # too long a number, too deep a nesting
            raise DataError(f"{path}, line {number}: not JSON that can be read: {error}") from None
        if not isinstance(found, dict):
            raise DataError(f"{path}, line {number}: expected a JSON object, found {type(found).__name__}")
        for field in fields:
            if field not in found:
                known = ", ".join(found) or "none"
                raise DataError(f"{path}, line {number}: no field {field!r}; its fields: {known}")
        yield number, tuple(found[field] for field in fields)


def read_jsonl(path: Path, fields: Sequence[str], encoding: str) -> Iterator[Numbered]:
    """As `read_json_objects`, for fields that hold strings."""
    for number, values in read_json_objects(path, fields, encoding):
        for field, value in zip(fields, values, strict=True):
            if not isinstance(value, str):
                raise DataError(
                    f"{path}, line {number}: field {field!r} holds {type(value).__name__}, expected a string"
                )
            _refuse_halves(value, f"{path}, line {number}: field {field!r}")
        yield number, values


def read_tagged_jsonl(path: Path, words: str, tags: str, encoding: str) -> Iterator[tuple[int, Tagged]]:
    """Two fields a line that hold equally long lists of strings."""
    for number, values in read_json_objects(path, (words, tags), encoding):
        for field, value in zip((words, tags), values, strict=True):
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise DataError(f"{path}, line {number}: field {field!r} must hold a list of strings")
            _refuse_halves("".join(value), f"{path}, line {number}: field {field!r}")
        yield number, _tagged(path, number, values[0], values[1])


def read_conll(path: Path, word: int, tag: int, encoding: str) -> Iterator[tuple[int, Tagged]]:
    """Words a line, sentences apart by blank lines; the number is that of the sentence's first line.

    Raises:
        DataError: a line has too few columns.
    """
    words: list[str] = []
    tags: list[str] = []
    first = 1
    for number, line in enumerate(chain(lines(path, encoding), ("",)), 1):
        cells = line.split()
        if not cells:
            if words:
                yield first, Tagged(tuple(words), tuple(tags))
            words, tags, first = [], [], number + 1
            continue
        if len(cells) < max(word, tag):
            raise DataError(
                f"{path}, line {number}: {len(cells)} columns, column {max(word, tag)} is asked for"
            )
        words.append(cells[word - 1])
        tags.append(cells[tag - 1])


def read_documents(path: Path, encoding: str) -> Iterator[tuple[int, Document]]:
    """Each line as a document."""
    for number, line in enumerate(lines(path, encoding), 1):
        yield number, Document(line)


def read_json_documents(path: Path, field: str, encoding: str) -> Iterator[tuple[int, Document]]:
    """A field of each JSON object as a document."""
    for number, (text,) in read_jsonl(path, (field,), encoding):
        yield number, Document(text)


def read_stream(path: Path, encoding: str) -> Document:
    """The whole file as one document, line ends included."""
    return Document(read_text(path, encoding))


def labelled(rows: Iterator[Numbered], path: Path) -> Iterator[tuple[int, Labelled]]:
    """Text and label; a blank label is an error."""
    for number, (text, label) in rows:
        if not label.strip():
            raise DataError(f"{path}, line {number}: the label is blank")
        yield number, Labelled(text, label)


def _refuse_halves(text: str, where: str) -> None:
    """JSON can write half a surrogate pair, which is no text."""
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise DataError(f"{where} has half a surrogate pair, which is no text")


def _tagged(path: Path, number: int, words: list[str], tags: list[str]) -> Tagged:
    if len(words) != len(tags):
        raise DataError(
            f"{path}, line {number}: {len(words)} words and {len(tags)} tags: each word needs one"
        )
    return Tagged(tuple(words), tuple(tags))
