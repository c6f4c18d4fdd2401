"""Checkpoints that are whole or not there, and resume to the very same numbers.

``checkpoints/step-00000500/`` holds ``model.safetensors`` (shared tensors once), ``optimizer.safetensors``,
``random.safetensors``, ``state.json`` and, written last, ``complete.json`` with a digest of each. The folder
gets its name only after all of it is on disk.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isoform.checkpoints.folders import replaced
from isoform.config.files import write_text
from isoform.errors import ArtifactError
from isoform.nn import Transformer
from isoform.training.optimizer import restore_state, state_tensors
from isoform.training.state import RunState, random_state, restore_random_state

MARK = "complete.json"
NAME = re.compile(r"step-(\d{8})")


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
        """Remove what an interrupted write has left; call it only while holding the run's lock."""
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if path.name.startswith(".step-"):
                    shutil.rmtree(path, ignore_errors=True)

    def save(
        self, state: RunState, model: Transformer, optimizer: torch.optim.AdamW, device: torch.device
    ) -> Path:
        """Write a checkpoint of the present step; one that is already there is replaced."""
        from safetensors.torch import save_file

        tensors, plain = random_state(device)
        folder = self.path(state.step)
        if folder.exists() and not (folder / MARK).is_file():
            shutil.rmtree(folder)  # a damaged one that was passed over on resuming
        with replaced(folder, mark=MARK) as new:
            save_file(_weights(model), new / "model.safetensors")
            save_file(
                _contiguous(state_tensors(optimizer, model.named_parameters())), new / "optimizer.safetensors"
            )
            save_file(tensors, new / "random.safetensors")
            write_text(new / "state.json", json.dumps({"state": state.to_dict(), "random": plain}) + "\n")
            digests = {path.name: _digest(path) for path in sorted(new.iterdir())}
            write_text(new / MARK, json.dumps(digests, indent=1) + "\n")
        return folder

    def prune(self, kept: Iterable[int | None]) -> None:
        """Remove all checkpoints but those of the given steps."""
        for step in set(self.steps()) - set(kept):
            # Renamed first, so that a half-removed one is never taken for a checkpoint.
            gone = self.folder / f".{self.path(step).name}.gone"
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

    def load(
        self, step: int, model: Transformer, optimizer: torch.optim.AdamW, device: torch.device
    ) -> RunState:
        """Put everything back as it was after a step.

        Raises:
            ArtifactError: a checkpoint of another network.
        """
        from safetensors.torch import load_file

        folder = self.path(step)
        self.load_weights(step, model)
        restore_state(optimizer, model.named_parameters(), load_file(folder / "optimizer.safetensors"))
        saved: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        restore_random_state(load_file(folder / "random.safetensors"), saved["random"], device)
        return RunState.from_dict(saved["state"])

    def load_weights(self, step: int, model: Transformer) -> None:
        """The weights alone."""
        fill(model, self.weights(step), str(self.path(step)))

    def weights(self, step: int) -> dict[str, Tensor]:
        """The weights of a checkpoint by name, shared ones under their first name."""
        from safetensors.torch import load_file

        return load_file(self.path(step) / "model.safetensors")

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


@torch.no_grad()
def fill(model: Transformer, weights: dict[str, Tensor], where: str) -> None:
    """Copy weights into a network, in place.

    Raises:
        ArtifactError: names or shapes that are not the network's.
    """
    wanted = dict(model.named_parameters())
    if wanted.keys() != weights.keys():
        name = next(iter(wanted.keys() ^ weights.keys()))
        fault = "missing" if name in wanted else "unknown"
        raise ArtifactError(f"{where}: {name} is {fault}: a checkpoint of another network")
    for name, parameter in wanted.items():
        if parameter.shape != weights[name].shape:
            raise ArtifactError(
                f"{where}: {name} has shape {list(weights[name].shape)}, expected {list(parameter.shape)}"
            )
        parameter.copy_(weights[name])


def _weights(model: Transformer) -> dict[str, Tensor]:
    return _contiguous({name: p.detach() for name, p in model.named_parameters()})


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.contiguous() for name, value in tensors.items()}


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
