"""What a run's folder remembers: the data it was begun with, and how it ended."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from isoform.config.base import Frozen, Index
from isoform.config.files import read, write_text
from isoform.data import Prepared
from isoform.errors import DataError
from isoform.training.config import RunConfig

RESULT = "result.json"
DATA = "data.json"


class Begun(Frozen):
    """``data.json``."""

    sha256: dict[str, str]
    """Digest of each file, or of ids kept on disk, by its path from the folder."""
    folder: Path | None = None
    """Where the run file's relative paths start."""


class FitEnded(Frozen):
    """The training's side of ``result.json``; see `isoform.training.state.RunState` and `FitResult`."""

    step: Index
    tokens: Index
    skipped: Index
    seconds: float
    waited: float = 0.0
    best_step: Index | None
    best_nll: float | None
    waiting: Index
    validated_step: Index | None
    ranking: tuple[tuple[float, Index], ...]
    stop: str
    weights: str
    validation_nll: float | None
    precision: str


class Ended(Frozen):
    """``result.json``."""

    fit: FitEnded
    """How training ended."""
    test: dict[str, Any] | None
    """The test's metrics."""


def result_folder(run: RunConfig, folder: Path) -> Path:
    """Where the finished network is put: an artifact of its own, or adapters for the one it started from."""
    return folder / ("artifact" if run.training.lora is None else "adapter")


def data_folder(run_file: Path) -> Path:
    """Where the relative paths of a run file start: beside it, or of one that a run has left in its folder
    where that run read its data.

    Raises:
        ConfigError: what the run has left beside it is damaged.
    """
    begun = run_file.parent / DATA
    found = None
    if run_file.name in ("run.toml", "request.toml") and begun.is_file():
        found = read(Begun, begun).folder
    return run_file.parent if found is None else found


def digests(prepared: Prepared) -> dict[str, Any]:
    """SHA-256 of every file that training and validation were read from, by its path in the run file; of ids
    kept on disk, which say themselves what they were made of, that of the ids."""
    base = prepared.task.base
    found: dict[str, str] = {}
    for part in (prepared.train, prepared.validation):
        if part is not None and part.stored is not None:
            found[os.path.relpath(part.stored.folder, base)] = part.stored.digest
        elif part is not None:
            for file in part.records.files:
                found[os.path.relpath(file, base)] = _digest(file)
    return {"sha256": found}


def forget_false_start(folder: Path) -> None:
    """A run that was refused before its first checkpoint binds no one: mended, it begins anew.

    Only what that run itself has written goes; a tokenizer beside it may be somebody's own.
    """
    request = folder / "request.toml"
    if not request.is_file() or (folder / "checkpoints").is_dir():
        return
    names = [DATA, "run.toml", "preflight.json"]
    for name in ("tokenizer", "source_tokenizer"):
        if (folder / f"{name}.specials.json").is_file():  # written last of a tokenizer's two files
            names += [f"{name}.specials.json", f"{name}.json", f"{name}.model"]
    for path in (*(folder / name for name in names), request):
        path.unlink(missing_ok=True)


def refuse_changed_data(folder: Path, prepared: Prepared) -> None:
    """Write down what a run is begun with, or hold it against that.

    Raises:
        DataError: a file is not what it was.
        ConfigError: what was written down is damaged.
    """
    path, now = folder / DATA, digests(prepared)
    told = {**now, "folder": str(prepared.task.base.resolve())}
    if path.is_file():
        begun = read(Begun, path)
        for name, digest in now["sha256"].items():
            if begun.sha256.get(name) != digest:
                raise DataError(
                    f"{name}: not the file this run was begun with in {folder}; put it back, or choose"
                    " another folder"
                )
        if str(begun.folder) == told["folder"]:
            return
    write_text(path, json.dumps(told, indent=1) + "\n")


def _digest(file: Path) -> str:
    """A folder's is that of its files."""
    total = hashlib.sha256()
    for path in sorted(file.rglob("*")) if file.is_dir() else (file,):
        if path.is_file():
            with path.open("rb") as content:
                while block := content.read(2**20):
                    total.update(block)
    return total.hexdigest()
