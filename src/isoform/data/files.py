"""Text files, plain or packed with gzip or zstandard, decoded strictly, with faults located."""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import IO, Any, cast

from isoform.errors import DataError

BLOCK = 2**17  # bytes of a packed file read at once


def bare_suffix(path: Path) -> str:
    """What kind of text a file holds, by its name: the suffix in front of ``.gz`` or ``.zst``."""
    return Path(path.name.removesuffix(".gz").removesuffix(".zst")).suffix


@contextlib.contextmanager
def opened(path: Path) -> Generator[IO[bytes]]:
    """The content of a file as a stream; ``.gz`` and ``.zst`` are unpacked on the way.

    Raises:
        DataError: the file is missing, a folder, unreadable, or not whole; ``.zst`` without its package.
    """
    with contextlib.ExitStack() as stack:
        try:
            plain = stack.enter_context(path.open("rb"))
            if path.suffix == ".gz":
                yield cast("IO[bytes]", stack.enter_context(gzip.open(plain)))
            elif path.suffix == ".zst":
                yield stack.enter_context(io.BufferedReader(_Zstandard(plain, path)))
            else:
                yield plain
        except FileNotFoundError:
            raise DataError(f"{path}: no such file") from None
        except IsADirectoryError:
            raise DataError(f"{path}: a folder, expected a file") from None
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{path}: not a whole gzip file: {error}") from None
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


class _Zstandard(io.RawIOBase):
    """What the frames of a file hold; a frame that does not end is an error, not the end of the file."""

    def __init__(self, plain: IO[bytes], path: Path) -> None:
        try:
            import zstandard
        except ImportError:
            raise DataError(f"{path}: needs the package zstandard: pip install 'isoform[corpora]'") from None
        self._plain, self._path, self._library = plain, path, zstandard
        self._frame: Any = None  # the one that is being read
        self._packed = self._ready = b""

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Unpack the next bytes."""
        while not self._ready:
            self._packed = self._packed or self._plain.read(BLOCK)
            if not self._packed:
                if self._frame is not None:
                    raise DataError(f"{self._path}: not a whole zstandard file: its last frame does not end")
                return 0
            if self._frame is None:
                self._frame = self._library.ZstdDecompressor().decompressobj()
            try:
                self._ready = self._frame.decompress(self._packed)
            except self._library.ZstdError as error:
                raise DataError(f"{self._path}: not a whole zstandard file: {error}") from None
            self._packed = self._frame.unused_data if self._frame.eof else b""
            self._frame = None if self._frame.eof else self._frame
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


def read_bytes(path: Path) -> bytes:
    """The content of a file; ``.gz`` and ``.zst`` are unpacked.

    Raises:
        DataError: as `opened`, or the file is empty.
    """
    # An empty file is no gzip file either; that it is empty says more.
    with contextlib.suppress(OSError):
        if path.is_file() and path.stat().st_size == 0:
            raise DataError(f"{path}: the file is empty")
    with opened(path) as file:
        data = file.read()
    if not data:
        raise DataError(f"{path}: the file is empty")
    return data


def read_text(path: Path, encoding: str) -> str:
    """The text of a file. A byte-order mark at its start belongs to the encoding, not to the text.

    Raises:
        DataError: as `read_bytes`, an unknown encoding, or bytes that are not in it (line and byte named).
    """
    _known(encoding, path)
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
    except UnicodeError as error:  # of codecs that do not say where
        raise DataError(f"{path}: not {encoding}: {error}") from None
    return text.removeprefix("\ufeff")


def lines(path: Path, encoding: str) -> Iterator[str]:
    r"""The lines of a file without their ends, one at a time: the file is never held as a whole.

    Only ``\n`` and ``\r\n`` end a line: other separators of Unicode are part of the text, so that the
    numbers agree with those of every other tool.

    Raises:
        DataError: as `read_text`.
    """
    for line in _pieces(path, encoding, None):
        yield line.removesuffix("\n").removesuffix("\r")


def blocks(path: Path, encoding: str, size: int) -> Iterator[str]:
    """The text of a file in blocks of so many characters, line ends as they are.

    Raises:
        DataError: as `read_text`.
    """
    return _pieces(path, encoding, size)


def _pieces(path: Path, encoding: str, size: int | None) -> Iterator[str]:
    """Lines with their ends, or blocks."""
    _known(encoding, path)
    first = True
    try:
        with opened(path) as file, io.TextIOWrapper(file, encoding=encoding, newline="\n") as text:
            while piece := text.readline() if size is None else text.read(size):
                yield piece.removeprefix("\ufeff") if first else piece
                first = False
    except UnicodeError as error:
        read_text(path, encoding)  # which says where
        # Read at once it may pass: without a byte-order mark the machine's own order is taken then.
        raise DataError(f"{path}: not {encoding}: {error}") from None
    if first:
        raise DataError(f"{path}: the file is empty")


def _known(encoding: str, path: Path) -> None:
    try:
        "a".encode(encoding)  # some codecs that there are, base64 say, are not of text
    except (LookupError, ValueError):
        raise DataError(f"{path}: unknown encoding {encoding!r}; a Python codec name is expected") from None
