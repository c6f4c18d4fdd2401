"""One process a run folder."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from isoform.errors import ConfigError
from isoform.training.group import ALONE, Group


@contextmanager
def locked(folder: Path, group: Group = ALONE) -> Generator[None]:
    """Hold the folder, the first process for all. The system lets go of it when the process ends, however it
    ends.

    Raises:
        ConfigError: another process holds it, or it is no folder.
    """
    from filelock import FileLock, Timeout

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"{folder}: a file, expected a folder for the run") from None
    lock = FileLock(folder / ".lock")

    def take() -> None:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise ConfigError(
                f"{folder}: another process is training in this folder; wait for it or choose another"
            ) from None

    group.from_first(take)
    try:
        yield
    finally:
        lock.release()
