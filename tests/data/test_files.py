from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from isoform.data.files import read_lines, read_text
from isoform.errors import DataError


def test_only_newlines_end_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("a\u2028b\x0bc\r\nd\n\n e ".encode())
    assert read_lines(path, "utf-8") == ["a\u2028b\x0bc", "d", "", " e "]


def test_gzip_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress("grüß\n".encode()))
    assert read_lines(path, "utf-8") == ["grüß"]


def test_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("é\n".encode("utf-8-sig"))
    assert read_text(path, "utf-8") == "é\n"
    path.write_bytes("é\n".encode("utf-16"))
    assert read_text(path, "utf-16") == "é\n"


def test_other_encodings_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("ä\n".encode("latin-1"))
    assert read_lines(path, "latin-1") == ["ä"]


def test_bytes_out_of_encoding_are_located(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("süß\nja\n".encode() + b"na\xefve\n")
    with pytest.raises(DataError, match=r"a\.txt, line 3: byte 0xef at offset 11 is not utf-8; .*encoding="):
        read_lines(path, "utf-8")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "the file is empty"),
        ("a.txt.gz", b"", "the file is empty"),
        ("a.txt.gz", gzip.compress(b"", mtime=0), "the file is empty"),
        ("a.txt.gz", gzip.compress(b"hello hello hello", mtime=0)[:-6], "not a whole gzip file"),
        ("a.txt.gz", b"plain", "not a whole gzip file"),
    ],
)
def test_unusable_content(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_text(tmp_path / name, "utf-8")


def test_missing_folder_and_unknown_encoding(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.txt: no such file"):
        read_text(tmp_path / "nowhere.txt", "utf-8")
    with pytest.raises(DataError, match="a folder"):
        read_text(tmp_path, "utf-8")
    with pytest.raises(DataError, match="unknown encoding 'utf-9'"):
        read_text(tmp_path / "nowhere.txt", "utf-9")
