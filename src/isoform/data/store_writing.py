"""Putting a corpus on disk as ids, a piece at a time; see `isoform.data.store`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isoform.config.files import read_table, write_text
from isoform.config.folders import replaced
from isoform.data.ragged import Ints, Ragged
from isoform.data.store import FORMAT, MARK, TYPES, Stored, contents
from isoform.errors import DataError

PIECE = 1 << 20  # numbers changed at a time


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Some records as they are put on disk.

    Attributes:
        rows: ids of each side, limits applied, templates included.
        numbers: of each row: ``kept`` (counted from this chunk's first record), ``lines``, ``prefix``,
            ``labels``.
        keys: hashes of the records and of their sources, kept or not.
        records: how many there were, empty ones left out.
        empty: how many were empty.
        dropped: how many were over a limit and left out.
        truncated: how many were cut.
        file: which of the files they come from.
        classes: how often each label stands in the records, empty ones included, in the order of the numbers
            that ``labels`` and the rows of ``tags`` hold.
    """

    rows: dict[str, Ragged]
    numbers: dict[str, Ints]
    keys: dict[str, NDArray[np.uint64]]
    records: int
    empty: int
    dropped: int
    truncated: int
    file: int
    classes: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])


def write_store(
    folder: Path, request: Mapping[str, Any], files: list[str], chunks: Iterable[Chunk]
) -> Stored:
    """Put chunks on disk in their order, whole or not at all.

    Args:
        folder: where.
        request: see `open_store`.
        files: what the chunks come from.
        chunks: see `Chunk`.

    Raises:
        DataError: no record is left, or no room on the disk.
        ArtifactError: there is something else at that place.
    """
    try:
        with replaced(folder, mark=MARK) as new:
            state = _fill(new, chunks, files)
            sizes = {path.name: path.stat().st_size for path in sorted(new.iterdir())}
            complete = {"format": FORMAT, "request": request, "files": files, "sizes": sizes, **state}
            write_text(new / MARK, json.dumps(complete, indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise DataError(f"{folder}: cannot be written: {error.strerror or error}") from None
    return Stored(folder, contents(read_table(folder / MARK), folder / MARK))


def _fill(new: Path, chunks: Iterable[Chunk], files: list[str]) -> dict[str, Any]:
    totals = dict.fromkeys(("records", "empty", "dropped", "truncated", "rows"), 0)
    tokens: dict[str, int] = {}
    longest: dict[str, int] = {}
    first_rows: list[int] = []
    classes: dict[str, int] = {}
    digest = hashlib.sha256()
    with _Files(new) as out:
        for chunk in chunks:
            while len(first_rows) <= chunk.file:
                first_rows.append(totals["rows"])
            numbers = _numbered(chunk, classes)
            for side, ragged in chunk.rows.items():
                ids = ragged.compact()
                if side == "tags":
                    ids = numbers[ids]
                digest.update(ids.tobytes())
                before = tokens.get(side, 0)
                out.write(f"{side}.ids", ids)
                out.write(f"{side}.starts", np.cumsum(ragged.lengths) - ragged.lengths + before)
                out.write(f"{side}.lengths", ragged.lengths)
                tokens[side] = before + len(ids)
                longest[side] = max(longest.get(side, 0), int(ragged.lengths.max(initial=0)))
            for name, values in chunk.numbers.items():
                if name == "labels":
                    values = numbers[values]
                    digest.update(values.tobytes())
                out.write(name, values + totals["records"] if name == "kept" else values)
            for name, keys in chunk.keys.items():
                out.write(f"{name}.keys", keys)
            totals["rows"] += len(chunk.numbers["kept"])
            for name in ("records", "empty", "dropped", "truncated"):
                totals[name] += getattr(chunk, name)
    if not totals["rows"]:
        what = (
            "every record is empty or over the limit" if totals["records"] + totals["empty"] else "no records"
        )
        raise DataError(f"{files[0]}: {what}")
    for path in new.glob("*.keys"):
        keys: NDArray[np.uint64] = np.fromfile(path, np.uint64)
        keys.sort()
        keys.tofile(path)
    ordered = dict(sorted(classes.items()))
    _renumber(new, [list(ordered).index(label) for label in classes])
    first_rows += [totals["rows"]] * (len(files) - len(first_rows))
    measured = {"tokens": tokens, "longest": longest, "first_rows": first_rows, "classes": ordered}
    return {**totals, **measured, "sha256": digest.hexdigest()}


def _numbered(chunk: Chunk, classes: dict[str, int]) -> NDArray[np.int32]:
    """What the chunk's numbers of labels are in the order in which all have been met; its counts are added.

    The last one stands for -1, where there is no label.
    """
    for label, count in chunk.classes.items():
        classes[label] = classes.get(label, 0) + count
    places = {label: number for number, label in enumerate(classes)}
    return np.array([*(places[label] for label in chunk.classes), -1], np.int32)


def _renumber(folder: Path, numbers: list[int]) -> None:
    """Give the labels on disk the numbers of their alphabetical order, a piece at a time."""
    table = np.array([*numbers, -1])
    for name in ("labels", "tags.ids"):
        if (folder / name).is_file():
            values = np.memmap(folder / name, dtype=TYPES.get(name.rpartition(".")[2], np.int64), mode="r+")
            for start in range(0, len(values), PIECE):
                values[start : start + PIECE] = table[values[start : start + PIECE]]
            values.flush()


class _Files:
    """Files that are appended to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}

    def __enter__(self) -> _Files:
        return self

    def write(self, name: str, values: NDArray[Any]) -> None:
        """Append an array."""
        if name not in self._open:
            self._open[name] = (self._folder / name).open("wb")
        kind = TYPES.get(name.rpartition(".")[2], np.int64)
        self._open[name].write(np.ascontiguousarray(values, kind).tobytes())

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()
