"""Text files, plain or gzipped, decoded strictly, with faults located."""

from __future__ import annotations

import codecs
import gzip
import zlib
from pathlib import Path

from isoform.errors import DataError


def read_bytes(path: Path) -> bytes:
    """The content of a file; ``.gz`` is unpacked.

    Raises:
        DataError: the file is missing, a folder, unreadable, empty, or not whole gzip data.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise DataError(f"{path}: a folder, expected a file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    if path.suffix == ".gz" and data:
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path}: not a whole gzip file: {error}") from None
    if not data:
        raise DataError(f"{path}: the file is empty")
    return data


def read_text(path: Path, encoding: str) -> str:
    """The text of a file. A byte-order mark at its start belongs to the encoding, not to the text.

    Raises:
        DataError: as `read_bytes`, an unknown encoding, or bytes that are not in it (line and byte named).
    """
    try:
        codecs.lookup(encoding)
    except LookupError:
        raise DataError(f"{path}: unknown encoding {encoding!r}; a Python codec name is expected") from None
    data = read_bytes(path)
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data[: error.start].decode(encoding, errors="replace").count("\n") + 1
        found = data[error.start : error.start + 1].hex()
        raise DataError(
            f"{path}, line {line}: byte 0x{found} at offset {error.start} is not {encoding};"
            " name the file's own encoding with encoding="
        ) from None
    return text.removeprefix("\ufeff")


def read_lines(path: Path, encoding: str) -> list[str]:
    r"""The lines of a file, without their ends.

    Only ``\n`` and ``\r\n`` end a line: other separators of Unicode are part of the text, so that the
    numbers agree with those of every other tool.
    """
    lines = read_text(path, encoding).split("\n")
    if lines[-1] == "":
        lines.pop()
    return [line.removesuffix("\r") for line in lines]
