"""A corpus as ids on disk, mapped into memory: written once, a piece at a time, and read by any run after it.

``complete.json``     what it was made of, counts, a digest of the ids; written last
``SIDE.ids``          int32, all rows one after the other
``SIDE.starts``, ``SIDE.lengths``  int64, where each row begins and how many ids it has
``kept``, ``lines``   int64, number and line of the record that each row comes from
``prefix``            int64, how many ids of each row are the prompt's, where there are prompts
``labels``            int64, number of each row's label; of tagged words ``tags.ids`` and so on, as of a side
``records.keys``, ``sources.keys``  uint64, sorted hashes of the training text, to find leaks by
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from isoform.config.base import Frozen, Index, parse
from isoform.config.files import read_table, write_text
from isoform.config.folders import replaced
from isoform.data.fit import Fit
from isoform.data.ragged import Ints, Ragged
from isoform.errors import ConfigError, DataError

FORMAT = 1
MARK = "complete.json"
TYPES = {"ids": np.int32, "keys": np.uint64}
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


class Contents(Frozen):
    """What ``complete.json`` says."""

    format: int
    request: dict[str, Any]
    """What the ids were made of."""
    files: tuple[str, ...]
    """The corpus' files."""
    first_rows: tuple[Index, ...]
    """Number of each file's first row."""
    sizes: dict[str, Index]
    """Bytes of each array."""
    records: Index
    """Records, empty ones left out."""
    empty: Index
    """Empty records."""
    dropped: Index
    """Records over a limit that were left out."""
    truncated: Index
    """Records that were cut."""
    rows: Index
    """Rows that are kept."""
    tokens: dict[str, Index]
    """Ids of each side."""
    longest: dict[str, Index]
    """Ids of each side's longest row."""
    classes: dict[str, Index] = Field(default_factory=dict[str, int])
    """How often each label stands in the records, in the order of their numbers."""
    sha256: str
    """Digest of all ids."""


@dataclasses.dataclass(frozen=True, eq=False)
class Stored:
    """An opened store. Arrays are mapped: what is not looked at is not in memory.

    Attributes:
        folder: where it lies.
        state: the contents of ``complete.json``.
    """

    folder: Path
    state: Contents

    @property
    def digest(self) -> str:
        """SHA-256 of all ids."""
        return self.state.sha256

    def rows(self, side: str) -> Ragged:
        """The rows of a side."""
        return Ragged(*(self.array(f"{side}.{part}") for part in ("ids", "starts", "lengths")))

    def fit(self) -> Fit:
        """What the limits did."""
        return Fit(self.array("kept"), self.state.dropped, self.state.truncated)

    def array(self, name: str) -> Any:
        """One array."""
        kind = TYPES.get(name.rpartition(".")[2], np.int64)
        # A plain array over the mapping: what memmap does at every access takes longer than small ones do.
        return np.memmap(self.folder / name, dtype=kind, mode="r").view(np.ndarray)

    def where(self, record: int) -> str:
        """Where a record came from, for messages."""
        place = int(np.searchsorted(self.array("kept"), record))
        file = bisect.bisect_right(self.state.first_rows, place) - 1
        return f"{self.state.files[file]}, line {int(self.array('lines')[place])}"

    def seen(self, name: str) -> Seen:
        """The texts of ``records`` or ``sources``."""
        return Seen(self.array(f"{name}.keys"))


class Seen:
    """Texts by their hashes.

    Args:
        keys: sorted.
    """

    def __init__(self, keys: NDArray[np.uint64]) -> None:
        self._keys = keys

    def __contains__(self, text: object) -> bool:
        key = keys_of([text if isinstance(text, tuple) else (text,)])[0]
        place = int(np.searchsorted(self._keys, key))
        return place < len(self._keys) and self._keys[place] == key


def keys_of(texts: Iterable[tuple[Any, ...]]) -> NDArray[np.uint64]:
    """A hash of 64 bits of each text or group of texts."""
    found = (hashlib.blake2b("\x1f".join(row).encode(), digest_size=8).digest() for row in texts)
    return np.frombuffer(b"".join(found), np.uint64)


def open_store(folder: Path, request: Mapping[str, Any]) -> Stored | None:
    """What was written before; None where nothing was.

    Args:
        folder: where.
        request: what it has to be made of.

    Raises:
        ConfigError: it was made of something else.
        DataError: it is damaged.
    """
    path = folder / MARK
    if not path.is_file():
        if folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(f"{folder}: not empty, and no store of ids; name another folder as data.store")
        return None
    state = read_table(path)
    if state.get("format") != FORMAT:
        raise DataError(f"{path}: format {state.get('format')!r} is unknown; this version reads {FORMAT}")
    found = _contents(state, path)
    for key, value in json.loads(json.dumps(request)).items():
        if found.request.get(key) != value:
            raise ConfigError(
                f"{folder}: its ids were made of other {key} than now; remove it, or name another folder"
            )
    for name, size in found.sizes.items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != size:
            raise DataError(f"{folder / name}: missing or cut; remove the folder to make it again")
    return Stored(folder, found)


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
    return Stored(folder, _contents(read_table(folder / MARK), folder / MARK))


def _contents(state: Mapping[str, Any], path: Path) -> Contents:
    try:
        return parse(Contents, state, where=f"{path}: damaged")
    except ConfigError as error:
        raise DataError(f"{error}; remove the folder to make it again") from None


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
