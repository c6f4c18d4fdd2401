from __future__ import annotations

from pathlib import Path

import pytest

from isoform.data import (
    Conll,
    Document,
    Jsonl,
    Labelled,
    LabelledData,
    LabelTsv,
    Pair,
    ParallelData,
    PrefixData,
    Prompted,
    Sides,
    Split,
    TaggedData,
    TextData,
    Tmx,
    Tsv,
    TwoFiles,
    read_part,
)
from isoform.errors import DataError


def test_every_kind_is_read_from_the_base_folder(tmp_path: Path) -> None:
    (tmp_path / "a.en").write_text("one\ntwo\n")
    (tmp_path / "a.de").write_text("eins\nzwei\n")
    (tmp_path / "a.tsv").write_text("one\teins\n")
    (tmp_path / "a.jsonl").write_text('{"q": "1+1", "a": "2"}\n')
    (tmp_path / "a.conll").write_text("a X\nb Y\n")
    (tmp_path / "a.tmx").write_text(
        '<tmx><body><tu><tuv xml:lang="en"><seg>a</seg></tuv>'
        '<tuv xml:lang="de"><seg>b</seg></tuv></tu></body></tmx>'
    )
    cases = [
        (
            ParallelData(format=TwoFiles(), train=Sides(source=Path("a.en"), target=Path("a.de"))),
            [Pair("one", "eins"), Pair("two", "zwei")],
        ),
        (ParallelData(format=Tsv(source=2, target=1), train=Path("a.tsv")), [Pair("eins", "one")]),
        (ParallelData(format=Tmx(source="de", target="en"), train=Path("a.tmx")), [Pair("b", "a")]),
        (PrefixData(format=Jsonl(source="q", target="a"), train=Path("a.jsonl")), [Prompted("1+1", "2")]),
        (LabelledData(format=LabelTsv(text=1, label=2), train=Path("a.tsv")), [Labelled("one", "eins")]),
        (TextData(documents="lines", train=Path("a.en")), [Document("one"), Document("two")]),
        (TextData(documents="stream", train=Path("a.en")), [Document("one\ntwo\n")]),
    ]
    for config, expected in cases:
        part = read_part(config, "train", tmp_path)
        assert part is not None
        assert list(part.items) == expected
        assert read_part(config, "test", tmp_path) is None
    tagged = TaggedData(format=Conll(word=1, tag=2), train=Path("a.conll"))
    part = read_part(tagged, "train", tmp_path)
    assert part is not None
    assert part.where(0) == f"{tmp_path / 'a.conll'}, line 1"


def test_empty_sides_are_refused_or_dropped_as_said(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("one\teins\n \tzwei\nthree\t\nfour\tvier\n")
    config = ParallelData(format=Tsv(source=1, target=2), train=Path("a.tsv"))
    with pytest.raises(DataError, match=r"a\.tsv, line 2: the source is empty \(2 such in train\)"):
        read_part(config, "train", tmp_path)
    part = read_part(config.replace(empty="drop"), "train", tmp_path)
    assert part is not None
    assert [r.source for r in part.items] == ["one", "four"]  # type: ignore[union-attr]
    assert part.where(1).endswith("line 4")


def test_file_without_any_record(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n\n")
    config = PrefixData(format=Jsonl(source="q", target="a"), train=Path("a.jsonl"))
    with pytest.raises(DataError, match="no records"):
        read_part(config, "train", tmp_path)
    (tmp_path / "a.tsv").write_text("\t\n\t\n")
    config = ParallelData(format=Tsv(source=1, target=2), train=Path("a.tsv"), empty="drop")
    with pytest.raises(DataError, match="every record of train is empty"):
        read_part(config, "train", tmp_path)


def test_random_split_keeps_equal_sources_together(tmp_path: Path) -> None:
    lines = [f"{i // 4}\t{i}" for i in range(200)]  # every source four times
    (tmp_path / "a.tsv").write_text("\n".join(lines))
    split = Split(validation=0.2, test=0.1, order="random", seed=5)
    config = ParallelData(format=Tsv(source=1, target=2), train=Path("a.tsv"), split=split)
    parts = [read_part(config, name, tmp_path) for name in ("train", "validation", "test")]
    sources = [{r.source for r in part.items} for part in parts if part is not None]  # type: ignore[union-attr]
    assert [len(s) for s in sources] == [35, 10, 5]
    assert len(set.union(*sources)) == 50
    assert sum(len(part) for part in parts if part) == 200
    again = read_part(config, "test", tmp_path)
    assert again is not None and parts[2] is not None
    assert list(again.items) == list(parts[2].items)
    other = read_part(config.replace(split__seed=6), "test", tmp_path)
    assert other is not None
    assert list(other.items) != list(parts[2].items)
    assert parts[1] is not None
    number = int(parts[1].where(3).rpartition(" ")[2])
    assert f"{parts[1].items[3].source}\t{parts[1].items[3].target}" == lines[number - 1]  # type: ignore[union-attr]


def test_contiguous_split_of_a_stream_keeps_its_order(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghij")
    split = Split(validation=0.2, test=0.1, order="contiguous")
    config = TextData(documents="stream", train=Path("a.txt"), split=split)
    texts = [read_part(config, name, tmp_path).items[0].text for name in ("train", "validation", "test")]  # type: ignore[union-attr]
    assert texts == ["abcdefg", "hi", "j"]


def test_split_without_a_test_part_and_with_too_little(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\nb\n")
    config = TextData(
        documents="lines", train=Path("a.txt"), split=Split(validation=0.1, order="random", seed=0)
    )
    assert read_part(config, "test", tmp_path) is None
    with pytest.raises(DataError, match="validation gets nothing"):
        read_part(config, "validation", tmp_path)


def test_a_pattern_without_a_store_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"part-\*\.txt: no such file; a pattern is for data.train with a"):
        read_part(TextData(documents="lines", train=Path("part-*.txt")), "train", tmp_path)
