"""The names that files and folders have until they are whole, and what killed writers leave under them."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

if sys.platform != "win32":
    import fcntl


@contextmanager
def temporary(path: Path, *, folder: bool = False) -> Generator[Path]:
    """An empty file or folder beside ``path``, to be filled and renamed to it; what is still there afterwards
    goes. What killed writers have left there for the same name goes first.

    The system holds a lock on it for as long as this process lives: that is how others know that it is still
    being written. On Windows nothing is known of writers, and nothing of theirs is removed.

    Args:
        path: the final name; its folder is made.
        folder: whether a folder is to be filled.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent, re.escape(path.name))
    new, handle = _create(path, folder)
    try:
        yield new
    finally:
        _remove(new)
        if handle is not None:
            os.close(handle)


def sweep(parent: Path, name: str) -> None:
    """Remove what killed writers have left in a folder.

    Args:
        parent: the folder.
        name: a regular expression for the names that they wrote for.
    """
    kind = re.compile(rf"\.(?P<name>{name})\.[a-z0-9_]{{8}}\.(tmp|old)")
    try:
        paths = list(parent.iterdir())
    except OSError:  # not there, or nothing that we may look into
        return
    for path in paths:
        found = kind.fullmatch(path.name)
        # What was put aside is the only copy where nothing has come into its place.
        if found is None or (path.suffix == ".old" and not (parent / found["name"]).exists()):
            continue
        handle = _lock(path, wait=False)
        if handle is not None:
            _remove(path)
            os.close(handle)


def beside(path: Path, suffix: str) -> Path:
    """A new hidden name in the same folder."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{suffix}")


def _create(path: Path, folder: bool) -> tuple[Path, int | None]:
    while True:
        new = beside(path, ".tmp")
        try:
            new.mkdir(mode=0o700) if folder else new.touch(exist_ok=False)
        except OSError as error:  # told of the name that was asked for
            raise OSError(error.errno, error.strerror, str(path)) from None
        handle = _lock(new, wait=True)
        if new.exists():
            return new, handle
        if handle is not None:  # swept by another process before it was locked
            os.close(handle)


def _lock(path: Path, *, wait: bool) -> int | None:
    """Hold a file or folder until the handle is closed; None where it cannot be."""
    if sys.platform == "win32":
        return None
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # another process holds it, or the file system knows no locks
        os.close(handle)
        return None
    return handle


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
