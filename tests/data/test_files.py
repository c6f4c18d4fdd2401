from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import zstandard

from isoform.data.files import blocks, lines, read_text
from isoform.errors import DataError


def test_only_newlines_end_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("a\u2028b\x0bc\r\nd\n\n e ".encode())
    assert list(lines(path, "utf-8")) == ["a\u2028b\x0bc", "d", "", " e "]


def test_gzip_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress("grüß\n".encode()))
    assert list(lines(path, "utf-8")) == ["grüß"]


def test_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("é\n".encode("utf-8-sig"))
    assert read_text(path, "utf-8") == "é\n"
    path.write_bytes("é\n".encode("utf-16"))
    assert read_text(path, "utf-16") == "é\n"


def test_other_encodings_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("ä\n".encode("latin-1"))
    assert list(lines(path, "latin-1")) == ["ä"]


def test_bytes_out_of_encoding_are_located(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("süß\nja\n".encode() + b"na\xefve\n")
    with pytest.raises(DataError, match=r"a\.txt, line 3: byte 0xef at offset 11 is not utf-8; .*encoding="):
        list(lines(path, "utf-8"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "the file is empty"),
        ("a.txt.gz", b"", "the file is empty"),
        ("a.txt.gz", gzip.compress(b"", mtime=0), "the file is empty"),
        ("a.txt.gz", gzip.compress(b"hello hello hello", mtime=0)[:-6], "not a whole gzip file"),
        ("a.txt.gz", b"plain", "not a whole gzip file"),
        ("a.txt.zst", b"", "the file is empty"),
        ("a.txt.zst", b"plain", "not a whole zstandard file"),
        ("a.txt.zst", zstandard.compress(b"hello hello\n" * 50)[:-3], "not a whole zstandard file"),
    ],
)
def test_unusable_content(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_text(tmp_path / name, "utf-8")
    with pytest.raises(DataError, match=message):
        list(lines(tmp_path / name, "utf-8"))


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress])
def test_packed_files_are_read_a_piece_at_a_time(tmp_path: Path, pack) -> None:
    suffix = {bytes: "", gzip.compress: ".gz", zstandard.compress: ".zst"}[pack]
    path = tmp_path / f"a.txt{suffix}"
    text = "".join(f"zeile {i} ä\r\n" if i % 3 else "\u2028\n" for i in range(20_000))
    # Two frames or members one after the other are one text.
    half = len(text.encode()) // 2
    path.write_bytes(pack(text.encode()[:half]) + pack(text.encode()[half:]))
    assert read_text(path, "utf-8") == text
    assert list(lines(path, "utf-8")) == [line.removesuffix("\r") for line in text.split("\n")[:-1]]
    found = list(blocks(path, "utf-8", 1000))
    assert "".join(found) == text and {len(block) for block in found[:-1]} == {1000}


def test_missing_folder_and_unknown_encoding(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.txt: no such file"):
        read_text(tmp_path / "nowhere.txt", "utf-8")
    with pytest.raises(DataError, match="a folder"):
        read_text(tmp_path, "utf-8")
    with pytest.raises(DataError, match="unknown encoding 'utf-9'"):
        read_text(tmp_path / "nowhere.txt", "utf-9")


@pytest.mark.parametrize("encoding", ["nope", "", "base64", "rot13", "undefined", "utf-8\0"])
def test_an_encoding_that_is_none_of_text(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc")
    with pytest.raises(DataError, match="unknown encoding"):
        read_text(tmp_path / "a.txt", encoding)


def test_a_codec_that_does_not_say_where(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a b\tb a\nc")
    with pytest.raises(DataError, match=r"a\.txt: not punycode"):
        read_text(tmp_path / "a.txt", "punycode")


def test_utf_16_without_a_byte_order_mark_is_no_stream_of_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("ab\ncd\n".encode("utf-16-le"))
    with pytest.raises(DataError, match=r"a\.txt: not utf-16: UTF-16 stream does not start with BOM"):
        list(lines(tmp_path / "a.txt", "utf-16"))
    assert list(lines(tmp_path / "a.txt", "utf-16-le")) == ["ab", "cd"]
