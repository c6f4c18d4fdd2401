"""From the files of a training part to a store of ids, a piece at a time, in one process or several."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np

from isoform.data.config import (
    LabelledData,
    ParallelData,
    PrefixData,
    Store,
    TaggedData,
    TextData,
)
from isoform.data.corpus import empty_records, rows
from isoform.data.files import blocks
from isoform.data.fit import Fit
from isoform.data.format_config import Sides
from isoform.data.forms import FORMS, encode_records
from isoform.data.progress import track
from isoform.data.ragged import Ints, Ragged
from isoform.data.records import Document, Record, Records, columns, labels
from isoform.data.store import Stored, keys_of, open_store
from isoform.data.store_writing import Chunk, write_store
from isoform.data.vocabularies import Tokenizers
from isoform.errors import ConfigError, DataError

Streamed = ParallelData | PrefixData | TextData | LabelledData | TaggedData
RECORDS = 2_000  # tokenized at a time
BLOCK = 1_000_000  # characters of a stream read at a time
STREAM_SAMPLE = 16  # blocks
AHEAD = 3  # pieces waiting for each worker
CUT = re.compile(r"(?<=[^\W\d_])(?=\n)")  # as `encode.encode_stream` cuts


@dataclasses.dataclass(frozen=True)
class Piece:
    """What is tokenized at a time.

    Attributes:
        file: number of the file it comes from.
        files: its path, or two of parallel lines.
        records: with their line numbers; of a stream one document.
    """

    file: int
    files: tuple[Path, ...]
    records: list[tuple[int, Record]]


def streamed(data: object) -> Store | None:
    """Where the training part is kept, if it is not read into memory."""
    return data.store if isinstance(data, Streamed) else None


def sample(data: Streamed, base: Path) -> Records[Record]:
    """The first records of the training part, held in memory.

    Raises:
        DataError: as the readers; no record.
    """
    assert data.store is not None
    inputs = _inputs(data, base)
    found: list[tuple[int, Record]] = []
    for files in inputs:
        left = data.store.sample - len(found)
        if _is_stream(data):
            texts = "".join(itertools.islice(blocks(files[0], data.encoding, BLOCK), STREAM_SAMPLE))
            return Records("train", [Document(texts)], [1], files)
        found += itertools.islice(rows(data, files), left)
        if len(found) >= data.store.sample or len(inputs) == 1:
            break
    if not found:
        raise DataError(f"{inputs[0][0]}: no records in the file")
    return Records("train", [r for _, r in found], [n for n, _ in found], inputs[0])


def stored(data: Streamed, tokenizers: Tokenizers, base: Path) -> Stored:
    """The store of the training part: opened, or written now.

    Raises:
        DataError: a record that cannot be used where the policies do not say ``"drop"``; a damaged store.
        ConfigError: a store of something else, or a stream that cannot be cut for its tokenizer.
    """
    store = data.store
    assert store is not None
    inputs = _inputs(data, base)
    if _is_stream(data) and not tokenizers.source.backend.line_ends_cut():
        raise ConfigError(
            "data.store: this tokenizer's ids change where a stream is cut; write documents line by line"
        )
    names = [" and ".join(str(file) for file in files) for files in inputs]
    request = {
        "files": [_state(file, base) for files in inputs for file in files],
        "settings": data.model_dump(mode="json", exclude={"train", "validation", "test", "store"}),
        "tokenizers": [
            [t.digest, dataclasses.asdict(t.template)] for t in (tokenizers.source, tokenizers.target)
        ],
    }
    folder = base / store.folder
    found = open_store(folder, request)
    if found is not None:
        return found
    chunks = _encoded(_Encoder(data, tokenizers), _pieces(data, inputs), store)
    return write_store(folder, request, names, track(chunks, total=None, what="writing ids"))


def _inputs(data: Streamed, base: Path) -> list[tuple[Path, ...]]:
    """The files, those of a pattern in the order of their names."""
    if isinstance(data.train, Sides):
        return [(base / data.train.source, base / data.train.target)]
    path = base / data.train
    found = [path] if path.exists() else sorted(path.parent.glob(path.name))
    if not found:
        raise DataError(f"{path}: no such file")
    return [(file,) for file in found]


def _state(file: Path, base: Path) -> list[Any]:
    """What a file was when it was read, wherever it is read from; a folder is known by its last file."""
    inner = sorted(file.iterdir())[-1] if file.is_dir() else file
    return [os.path.relpath(file, base), inner.stat().st_size, inner.stat().st_mtime_ns]


def _is_stream(data: Streamed) -> bool:
    return isinstance(data, TextData) and data.documents == "stream"


def _pieces(data: Streamed, inputs: list[tuple[Path, ...]]) -> Iterator[Piece]:
    for number, files in enumerate(inputs):
        if _is_stream(data):
            for text in _cut(blocks(files[0], data.encoding, BLOCK)):
                yield Piece(number, files, [(1, Document(text))])
            continue
        records = rows(data, files)
        while some := list(itertools.islice(records, RECORDS)):
            yield Piece(number, files, some)


def _cut(texts: Iterator[str]) -> Iterator[str]:
    """A stream in pieces that may be tokenized apart."""
    held = ""
    for text in texts:
        held += text
        places = [found.start() for found in CUT.finditer(held, max(len(held) - len(text), 1))]
        if places:
            yield held[: places[-1]]
            held = held[places[-1] :]
    if held:
        yield held


@dataclasses.dataclass(frozen=True)
class _Encoder:
    """Makes chunks; it is sent to the workers once."""

    data: Streamed
    tokenizers: Tokenizers

    def __call__(self, piece: Piece) -> Chunk:
        if _is_stream(self.data):
            return self._stream(piece)
        data, items = self.data, [record for _, record in piece.records]
        whole = Records("train", items, [number for number, _ in piece.records], piece.files)
        bad = set(empty_records(whole))
        if bad and data.empty == "error":
            raise DataError(f'{whole.where(min(bad))}: an empty side; correct the file or set empty = "drop"')
        kept = [i for i in range(len(items)) if i not in bad]
        records, classes = whole.select(kept, "train"), labels(items)
        more, sides, fit = self._rows(records, {label: number for number, label in enumerate(classes)})
        numbers = {"kept": fit.kept, "lines": np.array(records.lines, np.int64)[fit.kept], **more}
        texts = list(zip(*columns(records.items).values(), strict=True))
        keys = {"records": keys_of(texts), "sources": keys_of((text[0],) for text in texts)}
        counts = (len(records), len(bad), fit.dropped, fit.truncated)
        return Chunk(sides, numbers, keys, *counts, file=piece.file, classes=classes)

    def _rows(
        self, records: Records[Record], classes: dict[str, int]
    ) -> tuple[dict[str, Ints], dict[str, Ragged], Fit]:
        """Further numbers of each row, the rows by side, and which records they are."""
        form = FORMS[type(self.data)]
        if not len(records):
            return {}, {name: Ragged.from_lists([]) for name in form.sides}, Fit(np.arange(0), 0, 0)
        by_side, texts = self.tokenizers.by_side(records), columns(records.items)
        if isinstance(self.data, TaggedData):
            texts = {}  # tagged words are encoded one by one
        ids = {name: Ragged.from_lists(by_side[name].encode_batch(column)) for name, column in texts.items()}
        encoded: Any = encode_records(self.data, records, ids, self.tokenizers, classes)
        sides = {name: getattr(encoded, name) for name in form.sides}
        return {name: getattr(encoded, name) for name in form.numbers}, sides, encoded.fit

    def _stream(self, piece: Piece) -> Chunk:
        text = cast("Document", piece.records[0][1]).text
        ids = Ragged.from_lists([self.tokenizers.source.encode(text)])
        one = np.ones(1, np.int64)
        keys = {"records": keys_of([(text,)]), "sources": keys_of([(text,)])}
        return Chunk({"tokens": ids}, {"kept": one - 1, "lines": one}, keys, 1, 0, 0, 0, piece.file)


def _encoded(encoder: _Encoder, pieces: Iterator[Piece], store: Store) -> Generator[Chunk]:
    """The chunks in the order of their pieces; no more pieces are read than workers are busy with."""
    if not store.workers:
        yield from map(encoder, pieces)
        return
    import multiprocessing

    # Never forks of this process, which would copy whatever its threads hold; of a fresh one if possible.
    known = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if "forkserver" in known else "spawn")
    if "forkserver" in known:
        context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(
        store.workers, mp_context=context, initializer=_remember, initargs=(encoder,)
    ) as pool:
        waiting: collections.deque[Future[Chunk]] = collections.deque()
        try:
            for piece in pieces:
                waiting.append(pool.submit(_work, piece))
                if len(waiting) >= AHEAD * store.workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for left in waiting:
                left.cancel()


_mine: list[Callable[[Piece], Chunk]] = []


def _remember(encoder: _Encoder) -> None:
    """In a worker: keep the tokenizers, and leave when the process that asked for them is gone."""
    import threading

    _mine[:] = [encoder]
    threading.Thread(target=_outlive_nobody, daemon=True).start()


def _outlive_nobody() -> None:
    """A killed process closes nothing: its workers would wait for pieces for ever."""
    import multiprocessing
    import os

    asked = multiprocessing.parent_process()
    if asked is not None:
        asked.join()
        os._exit(1)


def _work(piece: Piece) -> Chunk:
    return _mine[0](piece)
