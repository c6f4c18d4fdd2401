"""The tensors of a run by name: out of the network and back, whole or in the pieces that processes hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isoform.errors import ArtifactError
from isoform.nn import Transformer
from isoform.training.ema import Ema
from isoform.training.optimizer import MOMENTS, restore_state, state_tensors
from isoform.training.parallel import cut_like


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
        parameter.copy_(cut_like(weights[name], parameter.detach()))


@dataclasses.dataclass(frozen=True, eq=False)
class Learnt:
    """The tensors of a run.

    Attributes:
        model: the network, whole or in pieces.
        optimizer: its moments.
        ema: the running mean of the weights, where there is one.
        device: where the run computes.
    """

    model: Transformer
    optimizer: torch.optim.AdamW
    ema: Ema | None
    device: torch.device

    def files(self) -> dict[str, dict[str, Tensor]]:
        """Everything by file and name."""
        named = dict(self.model.named_parameters())
        found = {
            "model.safetensors": {name: p.detach() for name, p in named.items()},
            "optimizer.safetensors": state_tensors(self.optimizer, named.items()),
        }
        return found if self.ema is None else {**found, "ema.safetensors": self.ema.tensors()}

    def restore(self, files: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Put moments and mean back; the weights are `fill`'s."""
        moments = files.get("optimizer.safetensors", {})
        restore_state(self.optimizer, self.model.named_parameters(), moments)
        if self.ema is not None:
            self.ema.restore(files["ema.safetensors"])


def _keys(learnt: Learnt) -> dict[str, Tensor]:
    """Everything by ``file:name``, as it lies in pieces."""
    return {
        f"{Path(file).stem}:{name}": tensor
        for file, content in learnt.files().items()
        for name, tensor in content.items()
    }


def save_pieces(learnt: Learnt, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(_keys(learnt), storage_writer=dcp.FileSystemWriter(folder, sync_files=True))


def load_pieces(learnt: Learnt, folder: Path) -> None:
    """From pieces to pieces, of perhaps another number of processes, without anybody holding the whole."""
    import torch.distributed.checkpoint as dcp

    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    weights = {f"model:{name}": p.detach() for name, p in learnt.model.named_parameters()}
    moments: dict[str, Tensor] = {}
    for name, p in learnt.model.named_parameters():
        for part in MOMENTS:
            if f"optimizer:{part}.{name}" in stored:
                moments[f"{part}.{name}"] = (
                    torch.zeros(()) if part == "step" else torch.zeros_like(p.detach())
                )
    mean = {} if learnt.ema is None else {f"ema:{n}": t for n, t in learnt.ema.tensors().items()}
    dcp.load({**weights, **mean, **{f"optimizer:{n}": t for n, t in moments.items()}}, checkpoint_id=folder)
    restore_state(learnt.optimizer, learnt.model.named_parameters(), moments)


def join_pieces(folder: Path) -> dict[str, Tensor]:
    """All tensors whole, read by one process for itself."""
    import warnings

    import torch.distributed.checkpoint as dcp

    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    found: dict[str, Any] = {
        key: torch.empty(item.size, dtype=item.properties.dtype)  # pyright: ignore[reportAttributeAccessIssue]
        for key, item in stored.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it reads alone is what was asked for
        dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found
