from __future__ import annotations

from pathlib import Path

import pytest

from isoform.data import readers
from isoform.data.records import Labelled, Pair, Tagged
from isoform.data.tmx import read_tmx
from isoform.errors import DataError


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8", newline="")
    return path


def test_parallel_lines(tmp_path: Path) -> None:
    en, de = write(tmp_path / "a.en", "one\ntwo\n"), write(tmp_path / "a.de", "eins\r\nzwei")
    assert list(readers.read_parallel_lines(en, de, "utf-8")) == [
        (1, Pair("one", "eins")),
        (2, Pair("two", "zwei")),
    ]


def test_unequal_line_counts_name_both(tmp_path: Path) -> None:
    en, de = write(tmp_path / "a.en", "one\ntwo\nthree\n"), write(tmp_path / "a.de", "eins\nzwei\n")
    with pytest.raises(DataError, match=r"a\.en has 3 lines and .*a\.de has 2"):
        list(readers.read_parallel_lines(en, de, "utf-8"))


def test_tsv_columns_count_from_one(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", 'x\t"a\tb\n')
    assert list(readers.read_tsv(path, (3, 2), "utf-8")) == [(1, ("b", '"a'))]


def test_tsv_missing_column(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "a\tb\nc\n")
    with pytest.raises(DataError, match=r"a\.tsv, line 2: 1 tab-separated columns, column 2"):
        list(readers.read_tsv(path, (1, 2), "utf-8"))


def test_jsonl(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"de": "ü", "en": "u"}\n\n{"en": "v", "de": "w", "x": 1}\n')
    assert list(readers.read_jsonl(path, ("en", "de"), "utf-8")) == [(1, ("u", "ü")), (3, ("v", "w"))]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: expected a JSON object, found list"),
        ('{"en": "v"}', "line 2: no field 'de'; its fields: en"),
        ('{"en": "v", "de": 3}', "line 2: field 'de' holds int, expected a string"),
        ('{"en": "v", "de": "\\ud83d!"}', "line 2: field 'de' has half a surrogate pair"),
        ('{"en": "v", "de": "w", "n": ' + "1" * 5000 + "}", "line 2: not JSON"),
        ("[" * 200_000, "line 2: not JSON"),
    ],
)
def test_jsonl_faults(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "a.jsonl", '{"de": "ü", "en": "u"}\n' + line)
    with pytest.raises(DataError, match=message):
        list(readers.read_jsonl(path, ("en", "de"), "utf-8"))


def test_tagged_jsonl(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"w": ["a", "b"], "t": ["X", "Y"]}\n{"w": ["a"], "t": []}\n')
    rows = readers.read_tagged_jsonl(path, "w", "t", "utf-8")
    assert next(rows) == (1, Tagged(("a", "b"), ("X", "Y")))
    with pytest.raises(DataError, match="line 2: 1 words and 0 tags"):
        next(rows)
    path = write(tmp_path / "b.jsonl", '{"w": "a", "t": ["X"]}\n')
    with pytest.raises(DataError, match="field 'w' must hold a list of strings"):
        list(readers.read_tagged_jsonl(path, "w", "t", "utf-8"))


def test_conll(tmp_path: Path) -> None:
    path = write(tmp_path / "a.conll", "\nLe DT B\nchat NN I\n\n\nmiaule VB O")
    assert list(readers.read_conll(path, 1, 3, "utf-8")) == [
        (2, Tagged(("Le", "chat"), ("B", "I"))),
        (6, Tagged(("miaule",), ("O",))),
    ]
    with pytest.raises(DataError, match=r"a\.conll, line 2: 3 columns, column 4"):
        list(readers.read_conll(path, 1, 4, "utf-8"))


def test_blank_label(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "good\tyes\nbad\t \n")
    rows = readers.labelled(readers.read_tsv(path, (1, 2), "utf-8"), path)
    assert next(rows) == (1, Labelled("good", "yes"))
    with pytest.raises(DataError, match="line 2: the label is blank"):
        next(rows)


TMX = """<?xml version="1.0" encoding="{encoding}"?>
<tmx version="1.4"><header srclang="en"/><body>
<tu><tuv xml:lang="EN-gb"><seg>a <bpt i="1">&lt;b&gt;</bpt>big<ept i="1">&lt;/b&gt;</ept> cat</seg></tuv>
<tuv xml:lang="de"><seg>eine <hi>große</hi> Katze</seg></tuv></tu>
<tu><tuv xml:lang="en"><seg>alone</seg></tuv></tu>
<tu><tuv lang="en"><seg>old</seg></tuv><tuv lang="de"><seg>alt</seg></tuv></tu>
</body></tmx>"""


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_tmx(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "a.tmx"
    path.write_bytes(TMX.format(encoding=encoding).encode(encoding))
    assert list(read_tmx(path, "en", "de")) == [
        (1, Pair("a big cat", "eine große Katze")),
        (3, Pair("old", "alt")),
    ]


def test_tmx_without_a_language_names_those_it_has(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tmx", TMX.format(encoding="utf-8"))
    with pytest.raises(DataError, match="no unit has both 'en' and 'fr'; known: de, en, en-gb"):
        list(read_tmx(path, "en", "fr"))


@pytest.mark.parametrize("encoding", ["Shift_JIS", "nope"])
def test_tmx_in_an_encoding_that_the_parser_has_not(tmp_path: Path, encoding: str) -> None:
    path = write(tmp_path / "a.tmx", f'<?xml version="1.0" encoding="{encoding}"?><tmx/>')
    with pytest.raises(DataError, match=r"a\.tmx: .*expected UTF-8"):
        list(read_tmx(path, "en", "de"))


def test_tmx_that_is_not_xml(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tmx", "<tmx>\n<body><tu></body></tmx>")
    with pytest.raises(DataError, match=r"a\.tmx, line 2: not XML"):
        list(read_tmx(path, "en", "fr"))
