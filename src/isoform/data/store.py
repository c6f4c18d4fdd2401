"""A corpus as ids on disk, mapped into memory: written once (`store_writing`), and read by any run after it.

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
from isoform.config.files import read_table
from isoform.data.fit import Fit
from isoform.data.ragged import Ragged
from isoform.errors import ConfigError, DataError

FORMAT = 1
MARK = "complete.json"
TYPES = {"ids": np.int32, "keys": np.uint64}


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
    found = contents(state, path)
    for key, value in json.loads(json.dumps(request)).items():
        if found.request.get(key) != value:
            raise ConfigError(
                f"{folder}: its ids were made of other {key} than now; remove it, or name another folder"
            )
    for name, size in found.sizes.items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != size:
            raise DataError(f"{folder / name}: missing or cut; remove the folder to make it again")
    return Stored(folder, found)


def contents(state: Mapping[str, Any], path: Path) -> Contents:
    """What ``complete.json`` says, validated.

    Raises:
        DataError: it is damaged.
    """
    try:
        return parse(Contents, state, where=f"{path}: damaged")
    except ConfigError as error:
        raise DataError(f"{error}; remove the folder to make it again") from None
