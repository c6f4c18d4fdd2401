"""A folder written whole or not at all."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from isoform.config.temporary import beside, temporary
from isoform.errors import ArtifactError

_AT_FDCWD = -100
_EXCHANGE = 2


@contextmanager
def replaced(folder: Path, *, mark: str) -> Generator[Path]:
    """Yield an empty sibling of ``folder`` to fill; afterwards it takes the name ``folder``.

    Everything in it is flushed to disk before the rename. An exception inside the block leaves what was at
    ``folder`` untouched and removes the sibling.

    Args:
        folder: the final name; its parents are made.
        mark: the file by which an earlier folder of the same kind is known.

    Raises:
        ArtifactError: ``folder`` exists and is neither empty nor marked, so it holds somebody's files.
    """
    folder = Path(os.path.abspath(folder))  # noqa: PTH100 - resolve() would follow a link at the end
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ArtifactError(f"{folder}: exists and is not a folder; choose another name")
    if folder.exists() and any(folder.iterdir()) and not (folder / mark).is_file():
        raise ArtifactError(f"{folder}: not empty and without {mark}; it will not be overwritten")
    with temporary(folder, folder=True) as new:
        yield new
        for path in (*new.rglob("*"), new):
            path.chmod(0o755 if path.is_dir() else 0o644)
            _flush(path)
        if folder.exists():
            _exchange(new, folder)
        else:
            new.rename(folder)
        _flush(folder.parent)


def _flush(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders: in one step where the system can, else by two renames that are undone on failure."""
    if sys.platform == "linux":
        call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if call is not None and not call(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _EXCHANGE):
            return
    aside = beside(old, ".old")
    old.rename(aside)
    try:
        new.rename(old)
    except BaseException:
        aside.rename(old)
        raise
    shutil.rmtree(aside, ignore_errors=True)
