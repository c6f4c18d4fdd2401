"""The tensors of a checkpoint folder: one safetensors file, several under an index, or a pickle."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from isoform.checkpoints.joined import Piece
from isoform.checkpoints.weights import SafetensorsFile, listed
from isoform.errors import ArtifactError

SINGLE, INDEX, PICKLE = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"


class Shards:
    """Several safetensors files as one set of tensors."""

    def __init__(self, where: Path, files: list[SafetensorsFile]) -> None:
        self.where = where
        self._files: dict[str, SafetensorsFile] = {}
        for file in files:
            for name in file.names():
                if name in self._files:
                    raise ArtifactError(f"{where}: tensor {name} is in two shards")
                self._files[name] = file

    def names(self) -> list[str]:
        """All tensors."""
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return self._files[name].shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """A tensor's type."""
        return self._files[name].dtype(name)

    def view(self, name: str) -> Tensor:
        """The tensor mapped from its file."""
        return self._files[name].view(name)

    def piece(self, name: str, first: int, last: int) -> Piece:
        """Where rows of a tensor lie, the last one excluded."""
        return self._files[name].piece(name, first, last)

    def read(self, name: str, into: Tensor | None = None) -> Tensor:
        """The tensor in memory of its own, or put into a given one."""
        return self._files[name].read(name, into)


class InMemory:
    """Tensors that are already there."""

    def __init__(self, where: Path, tensors: dict[str, Tensor]) -> None:
        self.where = where
        self._tensors = tensors

    def names(self) -> list[str]:
        """All tensors."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """A tensor's type."""
        return self._tensors[name].dtype

    def view(self, name: str) -> Tensor:
        """The tensor itself."""
        return self._tensors[name]

    def read(self, name: str, into: Tensor | None = None) -> Tensor:
        """The tensor itself, or a copy in a given one."""
        return self._tensors[name] if into is None else into.copy_(self._tensors[name])


def open_folder(folder: Path, *, unpickle: bool = False) -> Shards | InMemory:
    """Find and open the weights of a checkpoint folder.

    Args:
        folder: where they are.
        unpickle: read ``pytorch_model.bin``, tensors only, if there are no safetensors.

    Raises:
        ArtifactError: no weights, only a pickle, an index that names a missing shard or tensor.
    """
    if (folder / SINGLE).is_file():
        return Shards(folder / SINGLE, [SafetensorsFile(folder / SINGLE)])
    if (folder / INDEX).is_file():
        return _sharded(folder)
    if not (folder / PICKLE).is_file():
        found = sorted(p.name for p in folder.glob("pytorch_model*.bin*"))
        hint = f"; found {listed(found)}: convert it to safetensors first" if found else ""
        raise ArtifactError(f"{folder}: no {SINGLE} and no {INDEX}{hint}")
    if not unpickle:
        raise ArtifactError(
            f"{folder}: only {PICKLE}, a pickle, which can run code; ask for it with unpickle (--unpickle)"
        )
    return _pickled(folder / PICKLE)


def _sharded(folder: Path) -> Shards:
    path = folder / INDEX
    try:
        weight_map: dict[str, str] = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
        shards = sorted({Path(name).name for name in weight_map.values()})
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path}: not an index of shards: {error}") from None
    if missing := [name for name in shards if not (folder / name).is_file()]:
        raise ArtifactError(f"{path}: names shards that are not there: {listed(missing)}")
    files = [SafetensorsFile(folder / name) for name in shards]
    result = Shards(path, files)
    if lost := [name for name in weight_map if name not in set(result.names())]:
        raise ArtifactError(f"{path}: names tensors that are in no shard: {listed(lost)}")
    for file, shard in zip(files, shards, strict=True):
        if wrong := [name for name in file.names() if weight_map.get(name) != shard]:
            raise ArtifactError(f"{path}: does not say that {shard} holds {listed(wrong)}")
    return result


def _pickled(path: Path) -> InMemory:
    try:
        mapped = zipfile.is_zipfile(path)  # files of before PyTorch 1.6 can only be read whole
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # the unpickler refuses in many ways; all mean: not plain tensors
        raise ArtifactError(f"{path}: not a file of tensors: {str(error).splitlines()[0]}") from None
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise ArtifactError(f"{path}: expected a table of tensors")
    return InMemory(path, dict(state))
