"""Ids on disk give the batches that ids in memory give, from any kind of file, and stay where they are."""

from __future__ import annotations

import contextlib
import gzip
import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard

from isoform.data import (
    Characters,
    Columns,
    Conll,
    Jsonl,
    LabelColumns,
    LabelledData,
    LabelTsv,
    Packed,
    ParallelData,
    PrefixData,
    Prepared,
    Sides,
    Specials,
    Store,
    TaggedData,
    Task,
    TextData,
    TokenBudget,
    TokenizersConfig,
    Tsv,
    TwoFiles,
    Windows,
    prepare,
)
from isoform.data.streaming import _cut
from isoform.errors import ConfigError, DataError, IsoformError

SHARED = TokenizersConfig(shared=Characters(specials=Specials()))
BUDGET, STORE = TokenBudget(max_tokens=90, pool=8), Store(folder=Path("ids"), sample=12)
LETTERS = "abcdefgh "


def words(count: int, seed: int = 0) -> list[str]:
    generator = np.random.default_rng(seed)
    return [
        "".join(generator.choice(list(LETTERS), size=generator.integers(2, 12))) + "x" for _ in range(count)
    ]


def lines(path: Path, texts: list[str]) -> None:
    path.write_text("".join(f"{text}\n" for text in texts))


def ready(folder: Path, data: Any, batching: Any) -> Prepared:
    return prepare(Task(data, batching, folder, seed=7), SHARED)


def same(one: Prepared, two: Prepared) -> None:
    """Two epochs, batch by batch; the second from the middle on."""
    assert two.train.stored is not None and one.train.stored is None
    assert one.train.batches.report(0) == two.train.batches.report(0)
    for epoch, start in ((0, 0), (1, 2)):
        pairs = zip(one.train.batches.epoch(epoch, start), two.train.batches.epoch(epoch, start), strict=True)
        for a, b in pairs:
            for name in ("decoder_input", "source", "tokens"):
                mine, other = getattr(a, name, None), getattr(b, name, None)
                assert (mine is None) == (other is None)
                if mine is not None and other is not None:
                    assert torch.equal(mine.ids, other.ids)
                    assert torch.equal(mine.real_or_ones(), other.real_or_ones())
                    if mine.documents is not None:
                        assert other.documents is not None and torch.equal(mine.documents, other.documents)
            assert torch.equal(a.labels, b.labels) and torch.equal(a.supervised, b.supervised)
            assert torch.equal(a.rows, b.rows)


def kinds(folder: Path) -> dict[str, tuple[Any, Any]]:
    texts = words(60)
    texts[5] = texts[17] = ""
    lines(folder / "a.txt", texts)
    (folder / "pairs.tsv").write_text("".join(f"{t}\t{t[::-1]}\n" for t in texts))
    lines(folder / "b.txt", [t[::-1] for t in texts])
    (folder / "pairs.jsonl").write_text("".join(json.dumps({"s": t, "t": t[::-1]}) + "\n" for t in texts))
    (folder / "text.jsonl.zst").write_bytes(
        zstandard.compress("".join(json.dumps({"body": t}) + "\n" for t in texts).encode())
    )
    stream = folder / "stream.txt.gz"
    stream.write_bytes(gzip.compress("\n".join(t.strip() for t in texts if t).encode()))
    # Labels in no order, one of them on an empty text alone, one met late, one on over-long texts alone.
    names = ["pear", "fig", *(["fig", "apple"] * 29)]
    names[17], names[49] = "none", "date"
    (folder / "labels.tsv").write_text(
        "".join(f"{t}\t{'zoo' if len(t) > 10 else n}\n" for t, n in zip(texts, names, strict=True))
    )
    sentences = ("".join(f"{w} {w[-2:-1] or 'q'}{len(w) % 3}\n" for w in t.split()) for t in texts)
    (folder / "tags.conll").write_text("\n".join(sentence for sentence in sentences if sentence))
    drop: dict[str, Any] = {"empty": "drop", "over_long": "drop"}
    two = Sides(source=Path("a.txt"), target=Path("b.txt"))
    return {
        "lines": (TextData(documents="lines", train=Path("a.txt"), max_length=9, **drop), BUDGET),
        "jsonl": (
            TextData(documents="jsonl", field="body", train=Path("text.jsonl.zst"), empty="drop"),
            BUDGET,
        ),
        "packed": (
            TextData(documents="lines", train=Path("a.txt"), **drop),
            Packed(length=30, batch_size=3),
        ),
        "stream": (
            TextData(documents="stream", train=Path("stream.txt.gz")),
            Windows(length=10, batch_size=4),
        ),
        "pairs": (
            ParallelData(format=Tsv(source=1, target=2), train=Path("pairs.tsv"), max_source=8, **drop),
            BUDGET,
        ),
        "two files": (
            ParallelData(format=TwoFiles(), train=two, empty="drop", over_long="truncate", max_target=7),
            BUDGET,
        ),
        "prompts": (
            PrefixData(
                format=Jsonl(source="s", target="t"), train=Path("pairs.jsonl"), max_length=20, **drop
            ),
            BUDGET,
        ),
        "labelled": (
            LabelledData(format=LabelTsv(text=1, label=2), train=Path("labels.tsv"), max_length=10, **drop),
            BUDGET,
        ),
        "tagged": (
            TaggedData(
                format=Conll(word=1, tag=2), train=Path("tags.conll"), max_length=8, over_long="truncate"
            ),
            BUDGET,
        ),
    }


@pytest.mark.parametrize(
    "kind",
    ["lines", "jsonl", "packed", "stream", "pairs", "two files", "prompts", "labelled", "tagged"],
)
def test_batches_are_those_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    from isoform.data import streaming

    monkeypatch.setattr(streaming, "RECORDS", 7)
    monkeypatch.setattr(streaming, "BLOCK", 50)
    data, batching = kinds(tmp_path)[kind]
    # In memory the tokenizer learns from all records; here all of them are in the sample.
    kept = data.replace(store=Store(folder=Path("ids"), sample=1000))
    one, two = ready(tmp_path, data, batching), ready(tmp_path, kept, batching)
    same(one, two)
    assert one.classes == two.classes
    assert one.preflight.parts["train"].classes == two.preflight.parts["train"].classes
    first = next(iter(two.train.batches.epoch(0)))
    row = int(first.rows[0])
    assert one.train.where(row) == two.train.where(row)
    # What was written is what is read the next time, also by another run.
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "ids").iterdir()}
    same(one, ready(tmp_path, kept, batching))
    assert before == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "ids").iterdir()}
    stored = two.train.stored
    assert stored is not None
    ids = stored.rows("source" if "source" in stored.state.tokens else "tokens").flat
    assert isinstance(ids.base, np.memmap) and not ids.flags.writeable
    if one.train.fit is not None and two.train.fit is not None:
        assert (one.train.fit.dropped, one.train.fit.truncated) == (
            two.train.fit.dropped,
            two.train.fit.truncated,
        )
        assert one.train.fit.kept.tolist() == two.train.fit.kept.tolist()


def test_many_files_and_many_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from isoform.data import streaming

    texts = words(50)
    for number, part in enumerate((texts[:20], texts[20:21], texts[21:])):
        lines(tmp_path / f"part-{number}.txt", part)
    lines(tmp_path / "whole.txt", texts)
    monkeypatch.setattr(streaming, "RECORDS", 6)
    data = TextData(documents="lines", train=Path("whole.txt"))
    parts = data.replace(train=Path("part-*.txt"), store=Store(folder=Path("ids"), workers=2, sample=1000))
    one, two = ready(tmp_path, data, BUDGET), ready(tmp_path, parts, BUDGET)
    same(one, two)
    assert one.train.where(20).endswith("whole.txt, line 21")
    assert two.train.where(20).endswith("part-1.txt, line 1")
    assert two.train.where(49).endswith("part-2.txt, line 29") and two.train.where(0).endswith(
        "part-0.txt, line 1"
    )


def test_a_bad_record_is_named_by_its_own_file_whoever_tokenizes(tmp_path: Path) -> None:
    lines(tmp_path / "part-0.txt", words(5))
    lines(tmp_path / "part-1.txt", ["ab", "", "cd"])
    data = TextData(documents="lines", train=Path("part-*.txt"), store=STORE)
    for workers in (0, 2):
        chosen = data.replace(store=Store(folder=Path("ids"), workers=workers, sample=5))
        with pytest.raises(DataError, match=r"part-1\.txt, line 2: an empty side"):
            ready(tmp_path, chosen, BUDGET)
    assert not list(tmp_path.glob("*ids*"))  # nothing half-written


def test_labels_are_those_of_all_records_not_of_the_sample(tmp_path: Path) -> None:
    texts = words(40)
    (tmp_path / "train.tsv").write_text(
        "".join(f"{t}\t{'late' if i > 30 else 'soon'}\n" for i, t in enumerate(texts))
    )
    (tmp_path / "dev.tsv").write_text("ab\tlate\n")
    form = LabelTsv(text=1, label=2)
    data = LabelledData(format=form, train=Path("train.tsv"), validation=Path("dev.tsv"), store=STORE)
    found = ready(tmp_path, data, BUDGET)
    assert found.classes == {"late": 0, "soon": 1}
    assert found.preflight.parts["train"].classes == {"late": 9, "soon": 31}
    (tmp_path / "dev.tsv").write_text("ab\tnever\n")
    with pytest.raises(DataError, match="validation: label 'never' does not occur in train"):
        ready(tmp_path, data, BUDGET)


def test_records_that_also_stand_in_train_are_found_by_their_hash(tmp_path: Path) -> None:
    texts = words(40)
    lines(tmp_path / "train.txt", texts)
    lines(tmp_path / "dev.txt", [texts[33], "hhhx", texts[2]])
    data = TextData(documents="lines", train=Path("train.txt"), validation=Path("dev.txt"), store=STORE)
    report = ready(tmp_path, data, BUDGET).preflight
    assert report.parts["validation"].same_records.count == 2
    assert report.parts["train"].records == 40
    assert any("those of the first 12" in remark for remark in report.remarks)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("text", "made of other files"),
        ("limit", "made of other settings"),
        ("cut", "lines: missing or cut"),
        ("strange", "no store of ids"),
        ("typed", "complete.json: damaged: sizes: should be a valid dictionary.*remove the folder"),
        ("short", "complete.json: damaged: longest: required"),
        ("file", "ids: exists and is not a folder"),
    ],
)
def test_another_store_is_refused(tmp_path: Path, change: str, message: str) -> None:
    lines(tmp_path / "a.txt", words(20))
    data = TextData(documents="lines", train=Path("a.txt"), store=STORE)
    if change == "file":
        (tmp_path / "ids").write_text("mine")
    elif change == "strange":
        (tmp_path / "ids").mkdir()
        (tmp_path / "ids" / "thesis.txt").write_text("mine")
    else:
        ready(tmp_path, data, BUDGET)
    if change == "text":
        lines(tmp_path / "a.txt", words(21))
    if change == "limit":
        data = data.replace(max_length=50)
    if change == "cut":
        (tmp_path / "ids" / "lines").write_bytes((tmp_path / "ids" / "lines").read_bytes()[:-8])
    if change in ("typed", "short"):
        path = tmp_path / "ids" / "complete.json"
        state = json.loads(path.read_text())
        del state["longest"]
        path.write_text(json.dumps({**state, "longest": {}, "sizes": [1]} if change == "typed" else state))
    with pytest.raises(IsoformError, match=message):
        ready(tmp_path, data, BUDGET)


def test_a_store_is_the_same_wherever_it_is_read_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines(tmp_path / "a.txt", words(20))
    data = TextData(documents="lines", train=Path("a.txt"), store=STORE)
    made = ready(tmp_path, data, BUDGET).train.stored
    monkeypatch.chdir(tmp_path)
    again = ready(Path(), data, BUDGET).train.stored
    assert made is not None and again is not None and again.state == made.state


def test_a_store_that_finds_no_room_is_named(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk."""
    lines(tmp_path / "a.txt", words(200))
    data = TextData(documents="lines", train=Path("a.txt"), store=STORE)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(DataError, match="ids: cannot be written: File too large"):
            ready(tmp_path, data, BUDGET)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_what_cannot_be_kept_on_disk(tmp_path: Path) -> None:
    lines(tmp_path / "a.txt", ["", ""])
    data = TextData(documents="lines", train=Path("a.txt"), empty="drop", store=STORE)
    with pytest.raises(DataError, match=r"a\.txt: every record is empty or over the limit"):
        prepare(Task(data, BUDGET, tmp_path, seed=1), _letters(tmp_path))
    with pytest.raises(DataError, match=r"nothing-\*\.txt: no such file"):
        ready(tmp_path, data.replace(train=Path("nothing-*.txt")), BUDGET)
    with pytest.raises(ConfigError, match="a split needs all records at once"):
        data.replace(split={"validation": 0.1, "order": "contiguous"})
    with pytest.raises(ConfigError, match="field belongs to"):
        data.replace(field="body")


def _letters(folder: Path) -> Any:
    lines(folder / "letters.txt", [LETTERS])
    return ready(folder, TextData(documents="lines", train=Path("letters.txt")), BUDGET).tokenizers


def test_a_stream_is_cut_where_its_tokenizer_cuts() -> None:
    text = "".join(f"{word}\n" if i % 3 else f"{word} " for i, word in enumerate(words(200)))
    pieces = list(_cut(text[i : i + 37] for i in range(0, len(text), 37)))
    assert "".join(pieces) == text and len(pieces) > 20
    assert all(piece.startswith("\n") for piece in pieces[1:])


def test_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = words(30)
    parquet.write_table(
        arrow.table({"body": texts, "n": list(range(30))}), tmp_path / "a.parquet", row_group_size=7
    )
    lines(tmp_path / "a.txt", texts)
    data = TextData(documents="parquet", field="body", train=Path("a.parquet"))
    one = ready(tmp_path, TextData(documents="lines", train=Path("a.txt")), BUDGET)
    same(one, ready(tmp_path, data.replace(store=Store(folder=Path("ids"), sample=1000)), BUDGET))
    assert ready(tmp_path, data, BUDGET).train.batches.report(0) == one.train.batches.report(0)
    for field, message in (
        ("bod", "no column 'bod'; did you mean 'body'"),
        ("n", "holds int64, expected strings"),
    ):
        with pytest.raises(DataError, match=message):
            ready(tmp_path, data.replace(field=field), BUDGET)
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(DataError, match="not a whole parquet file"):
        ready(tmp_path, data, BUDGET)


def test_pairs_and_labels_from_columns(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    data: dict[str, Any] = {
        "pairs": ParallelData(format=Tsv(source=1, target=2), train=Path("pairs.tsv"), empty="drop"),
        "labels": LabelledData(format=LabelTsv(text=1, label=2), train=Path("labels.tsv"), empty="drop"),
    }
    kinds(tmp_path)
    forms: dict[str, Any] = {
        "pairs": Columns(kind="parquet", source="b", target="a"),
        "labels": LabelColumns(kind="parquet", text="b", label="a"),
    }
    for name, plain in data.items():
        rows = [line.split("\t") for line in (tmp_path / f"{name}.tsv").read_text().splitlines()]
        table = arrow.table({"a": [row[1] for row in rows], "b": [row[0] for row in rows]})
        parquet.write_table(table, tmp_path / f"{name}.parquet", row_group_size=7)
        columns = plain.replace(format=forms[name], train=Path(f"{name}.parquet"))
        one, two = ready(tmp_path, plain, BUDGET), ready(tmp_path, columns, BUDGET)
        assert one.train.records.items == two.train.records.items
        same(one, ready(tmp_path, columns.replace(store=Store(folder=Path(name), sample=1000)), BUDGET))
    with pytest.raises(DataError, match="no column 'c'"):
        ready(tmp_path, columns.replace(format=LabelColumns(kind="parquet", text="b", label="c")), BUDGET)


@pytest.mark.long  # the library takes seconds to import
def test_data_sets_saved_to_disk(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    texts = words(30)
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"body": texts, "n": list(range(30))}).save_to_disk(str(tmp_path / "set"))
    lines(tmp_path / "a.txt", texts)
    pairs = Columns(kind="dataset", source="body", target="body")
    assert len(ready(tmp_path, ParallelData(format=pairs, train=Path("set")), BUDGET).train.records) == 30
    data = TextData(documents="dataset", field="body", train=Path("set"))
    one = ready(tmp_path, TextData(documents="lines", train=Path("a.txt")), BUDGET)
    same(one, ready(tmp_path, data.replace(store=Store(folder=Path("ids"), sample=1000)), BUDGET))
    for change, message in (
        ({"field": "bod"}, "no column 'bod'; did you mean 'body'"),
        ({"field": "n"}, "row 1: 'n' holds int, expected a string"),
        ({"train": Path("a.txt")}, "no data set saved to disk"),
    ):
        with pytest.raises(DataError, match=message):
            ready(tmp_path, data.replace(**change), BUDGET)


WAITING = """
import itertools, sys
from pathlib import Path
from isoform.data import Store, streaming
found = streaming._encoded(len, itertools.repeat([1, 2]), Store(folder=Path("ids"), workers=2))
print(next(found), flush=True)
sys.stdin.read()
"""


def of_session(session: int) -> list[int]:
    """The processes of a session that still run."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # gone meanwhile
            fields = path.read_text().rpartition(")")[2].split()
            if fields[0] != "Z" and int(fields[3]) == session:
                found.append(int(path.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_workers_leave_when_who_asked_for_them_is_killed() -> None:
    command = [sys.executable, "-c", WAITING]
    asking = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert asking.stdout is not None and asking.stdout.readline() == "2\n"
    assert len(of_session(asking.pid)) >= 3  # itself and its workers
    asking.kill()
    asking.communicate()
    ends = time.monotonic() + 60
    while of_session(asking.pid) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not of_session(asking.pid)
