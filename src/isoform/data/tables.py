"""Columns of strings from parquet files and from data sets on disk; both need the extra ``corpora``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from isoform.errors import DataError, did_you_mean

Numbered = tuple[int, tuple[str, ...]]


def read_table(kind: str, path: Path, columns: Sequence[str]) -> Iterator[Numbered]:
    """The rows of either, counted from 1.

    Args:
        kind: ``"parquet"`` or ``"dataset"``.
        path: the file, or the folder.
        columns: which.

    Raises:
        DataError: as the two functions below.
    """
    return (read_parquet if kind == "parquet" else read_dataset)(path, columns)


def read_parquet(path: Path, columns: Sequence[str]) -> Iterator[Numbered]:
    """Columns of strings, a row group at a time.

    Raises:
        DataError: the package is missing, the file is damaged, or a column is missing or holds no strings.
    """
    try:
        import pyarrow as arrow  # pyright: ignore[reportMissingImports]
        import pyarrow.parquet as parquet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise DataError(f"{path}: needs the package pyarrow: pip install 'isoform[corpora]'") from None
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        with parquet.ParquetFile(path) as file:
            _refuse_missing(path, columns, file.schema_arrow.names)
            for column in columns:
                kind = file.schema_arrow.field(column).type
                if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
                    raise DataError(f"{path}: column {column!r} holds {kind}, expected strings")
            number = 0
            for batch in file.iter_batches(columns=list(columns)):
                for row in zip(*(batch.column(column).to_pylist() for column in columns), strict=True):
                    number += 1
                    yield number, tuple(text or "" for text in row)
    except (arrow.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: not a whole parquet file: {' '.join(str(error).split())}") from None


def read_dataset(path: Path, columns: Sequence[str]) -> Iterator[Numbered]:
    """Columns of strings of what `datasets.Dataset.save_to_disk` wrote; it stays on disk.

    Raises:
        DataError: the package is missing, there is no such data set, or a column is missing or holds no
            strings.
    """
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise DataError(f"{path}: needs the package datasets: pip install 'isoform[corpora]'") from None
    try:
        found = datasets.load_from_disk(str(path))
    except (FileNotFoundError, ValueError, OSError) as error:
        raise DataError(f"{path}: no data set saved to disk: {' '.join(str(error).split())}") from None
    if not isinstance(found, datasets.Dataset):
        raise DataError(f"{path}: several splits; name the folder of one")
    _refuse_missing(path, columns, found.column_names)
    rows: Any = found.select_columns(list(columns))
    for number, row in enumerate(rows, 1):
        for column in columns:
            if not isinstance(row[column], str):
                raise DataError(
                    f"{path}, row {number}: {column!r} holds {type(row[column]).__name__}, expected a string"
                )
        yield number, tuple(row[column] for column in columns)


def _refuse_missing(path: Path, columns: Sequence[str], known: Sequence[str]) -> None:
    for column in columns:
        if column not in known:
            raise DataError(f"{path}: no column {column!r}{did_you_mean(column, known)}")
