"""Checkpoints that are whole or not there, and resume to the very same numbers.

``checkpoints/step-00000500/`` holds ``model.safetensors`` (shared tensors once), ``optimizer.safetensors``,
``ema.safetensors`` where there is a running mean, ``random.safetensors``, ``state.json`` and, written last,
``complete.json`` with a digest of each. Sharded tensors lie in ``pieces/`` instead, in the form of
`torch.distributed.checkpoint`. Either form is read by any number of processes. The folder gets its name only
after all of it is on disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from isoform.config.files import write_text
from isoform.config.folders import replaced
from isoform.config.temporary import beside, sweep
from isoform.errors import ArtifactError, IsoformError
from isoform.nn import Transformer
from isoform.training.group import ALONE, Group
from isoform.training.learnt import Learnt, fill, join_pieces, load_pieces, save_pieces
from isoform.training.state import RunState, random_state, restore_random_state

MARK = "complete.json"
FILES = ("model.safetensors", "optimizer.safetensors", "ema.safetensors")
PIECES = "pieces"
NAME = re.compile(r"step-(\d{8})")


class DiskError(IsoformError):
    """A checkpoint that cannot be written, for want of room or otherwise; those before it are whole."""


@dataclasses.dataclass(frozen=True)
class Store:
    """The checkpoints of one run.

    Args:
        folder: where they lie; made when first written to.
    """

    folder: Path

    def path(self, step: int) -> Path:
        """The folder of a checkpoint."""
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps that have a folder, whole or not, in order."""
        if not self.folder.is_dir():
            return []
        return sorted(int(m[1]) for p in self.folder.iterdir() if (m := NAME.fullmatch(p.name)))

    def clean(self) -> None:
        """Remove what killed writers have left."""
        sweep(self.folder, NAME.pattern)

    def save(self, state: RunState, learnt: Learnt, group: Group = ALONE) -> Path:
        """Write a checkpoint of the present step; one that is already there is replaced.

        Weights in pieces are written by all processes, everything else by the first, which alone renames.
        Where the disk is full, checkpoints that a resumption does not need make room first.

        Raises:
            DiskError: it cannot be written; the checkpoints before it are as they were.
        """
        sharded = any(isinstance(p, DTensor) for p in learnt.model.parameters())
        state_ = json.dumps({"state": state.to_dict()})
        try:
            return self._write(state.step, state_, learnt, group, sharded)
        except (OSError, SafetensorError, CheckpointException) as error:
            needed = {self.latest_first(group), *(step for _, step in state.ranking)}
            group.from_first(lambda: self.prune(needed))
            try:
                return self._write(state.step, state_, learnt, group, sharded)
            except (OSError, SafetensorError, CheckpointException):
                last = self.latest_first(group)
                kept = "none was written before" if last is None else f"the last whole one is of step {last}"
                raise DiskError(
                    f"{self.path(state.step)}: cannot be written: {_reason(error)}; {kept}; with room on the"
                    " disk the same command goes on from there"
                ) from None

    def latest_first(self, group: Group) -> int | None:
        """The last whole checkpoint, as the first process sees it."""
        return group.from_first(lambda: self.latest()[0] if self.steps() else None)

    def _write(self, step: int, state: str, learnt: Learnt, group: Group, sharded: bool) -> Path:
        folder = self.path(step)
        with contextlib.ExitStack() as stack:

            def open_() -> Path:
                if folder.exists() and not (folder / MARK).is_file():
                    shutil.rmtree(folder)  # a damaged one that was passed over on resuming
                return stack.enter_context(replaced(folder, mark=MARK))

            new = group.from_first(open_)
            tensors, plain = random_state(learnt.device)
            if sharded:
                group.together(lambda: save_pieces(learnt, new / PIECES))

            def close() -> None:
                if not sharded:
                    for name, content in learnt.files().items():
                        save_file(_contiguous(content), new / name)
                save_file(tensors, new / "random.safetensors")
                whole = {**json.loads(state), "random": plain}
                write_text(new / "state.json", json.dumps(whole) + "\n")
                files = sorted(path for path in new.rglob("*") if path.is_file())
                digests = {path.relative_to(new).as_posix(): _digest(path) for path in files}
                write_text(new / MARK, json.dumps(digests, indent=1) + "\n")
                stack.close()  # flushed and renamed here

            group.from_first(close)
        return folder

    def prune(self, kept: Iterable[int | None]) -> None:
        """Remove all checkpoints but those of the given steps."""
        for step in set(self.steps()) - set(kept):
            # Renamed first, so that a half-removed one is never taken for a checkpoint.
            gone = beside(self.path(step), ".tmp")
            self.path(step).rename(gone)
            shutil.rmtree(gone)

    def fault(self, step: int) -> str | None:
        """Why a checkpoint cannot be used; None when it is whole."""
        folder = self.path(step)
        try:
            digests = json.loads((folder / MARK).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return f"{MARK} is missing or damaged"
        for name, digest in digests.items():
            if not (folder / name).is_file():
                return f"{name} is missing"
            if _digest(folder / name) != digest:
                return f"{name} is truncated or damaged"
        return None

    def latest(self) -> tuple[int | None, list[str]]:
        """The last whole checkpoint, and a line for each damaged one that was passed over.

        Raises:
            ArtifactError: there are checkpoints, and none of them is whole.
        """
        remarks: list[str] = []
        steps = self.steps()
        for step in reversed(steps):
            fault = self.fault(step)
            if fault is None:
                return step, remarks
            remarks.append(f"{self.path(step)}: {fault}; going back to the checkpoint before it")
        if steps:
            raise ArtifactError(
                f"{self.folder}: none of its {len(steps)} checkpoints is whole ({self.fault(steps[-1])});"
                " remove the folder to start afresh"
            )
        return None, remarks

    def load(self, step: int, learnt: Learnt) -> RunState:
        """Put everything back as it was after a step, whatever number of processes has written it.

        Raises:
            ArtifactError: a checkpoint of another network.
        """
        folder = self.path(step)
        pieces = folder / PIECES
        sharded = any(isinstance(p, DTensor) for p in learnt.model.parameters())
        if pieces.is_dir() and sharded:
            load_pieces(learnt, pieces)
        else:
            found = self.files(step)
            fill(learnt.model, found["model.safetensors"], str(folder))
            learnt.restore(found)
        saved: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        restore_random_state(load_file(folder / "random.safetensors"), saved["random"], learnt.device)
        return RunState.from_dict(saved["state"])

    def files(self, step: int) -> dict[str, dict[str, Tensor]]:
        """The tensors of a checkpoint as the files of one process hold them."""
        folder = self.path(step)
        if not (folder / PIECES).is_dir():
            names = [name for name in FILES if (folder / name).is_file()]
            return {name: load_file(folder / name) for name in names}
        found: dict[str, dict[str, Tensor]] = {}
        for key, tensor in join_pieces(folder / PIECES).items():
            file, _, name = key.partition(":")
            found.setdefault(f"{file}.safetensors", {})[name] = tensor
        return found

    def load_weights(self, step: int, model: Transformer) -> None:
        """The weights alone."""
        fill(model, self.weights(step), str(self.path(step)))

    def weights(self, step: int) -> dict[str, Tensor]:
        """The weights that a checkpoint is judged by, shared ones under their first name: the running mean
        where there is one."""
        found = self.files(step)
        return {**found["model.safetensors"], **found.get("ema.safetensors", {})}

    def average(self, steps: Iterable[int]) -> dict[str, Tensor]:
        """The mean weights of several checkpoints, summed in float64."""
        chosen = list(steps)
        total: dict[str, Tensor] = {}
        kinds: dict[str, torch.dtype] = {}
        for step in chosen:
            for name, value in self.weights(step).items():
                kinds[name] = value.dtype
                total[name] = total[name] + value.double() if name in total else value.double()
        return {name: (value / len(chosen)).to(kinds[name]) for name, value in total.items()}


def _reason(error: BaseException) -> str:
    """The first line of what went wrong; of an error that several processes had, the first cause."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return said.splitlines()[0]


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.contiguous() for name, value in tensors.items()}


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
