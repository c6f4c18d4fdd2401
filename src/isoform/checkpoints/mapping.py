"""The one engine that applies a mapping in both directions (R39–R40)."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from isoform.checkpoints import operations as op
from isoform.checkpoints.entries import FamilyMapping, Rule
from isoform.checkpoints.joined import joined
from isoform.checkpoints.shards import Shards
from isoform.checkpoints.weights import fill, refuse_strangers
from isoform.errors import ArtifactError, CheckError
from isoform.nn import Transformer


class Weights(Protocol):
    """Named tensors somewhere: in one file, in several, in memory."""

    where: Path

    def names(self) -> list[str]:
        """All tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """A tensor's type."""
        ...

    def view(self, name: str) -> Tensor:
        """The tensor, mapped from the file where possible."""
        ...

    def read(self, name: str, into: Tensor | None = None) -> Tensor:
        """The tensor, to be rearranged, or put into a given one of its shape and type."""
        ...


def load_weights(
    model: Transformer,
    mapping: FamilyMapping,
    weights: Weights,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> None:
    """Fill a skeleton from foreign tensors, rule by rule.

    Args:
        model: a network on the meta device.
        mapping: the family's.
        weights: where the tensors are.
        dtype: what to hold them in; default: the widest floating type among them.
        device: where to put them.

    Raises:
        ArtifactError: tensors that are missing, unknown or misshaped, a tie whose copies differ, a buffer
            with unexpected content.
    """
    rules = mapping.rules(model)
    ours = {name: p.shape for name, p in model.named_parameters()}
    shapes = _their_shapes(ours, rules)
    actual = actual_names(mapping, weights)
    actual = _without_ignored(mapping, weights, actual)
    actual = _without_ties(mapping, weights, actual)
    refuse_strangers(weights.where, shapes, {name: weights.shape(real) for name, real in actual.items()})
    kinds = {weights.dtype(actual[name]) for name in shapes}
    if strange := [name for name in shapes if not weights.dtype(actual[name]).is_floating_point]:
        raise ArtifactError(
            f"{weights.where}: tensor {strange[0]} has dtype {weights.dtype(actual[strange[0]])}, "
            "expected a floating type"
        )
    wide = dtype or _widest(kinds)

    places: set[int] = set()

    def own(tensor: Tensor) -> Tensor:
        """Formats store equal tensors once; two parameters that are not tied must not share their memory."""
        if tensor.numel() and tensor.data_ptr() in places:
            tensor = tensor.clone()
        places.add(tensor.data_ptr())
        return tensor

    def values() -> Iterator[tuple[str, Tensor]]:
        for rule in rules:
            if not rule.steps:
                result = [weights.view(actual[name]) for name in rule.theirs]
            elif rule.steps == (op.Transpose(),):
                # A view of the mapped file: products read either layout, and nothing is held twice.
                result = [weights.view(actual[name]).t() for name in rule.theirs]
            elif runs := op.runs(rule.steps, [shapes[name][0] for name in rule.theirs]):
                gathered = _gathered(weights, [actual[name] for name in rule.theirs], runs)
                result = [gathered.view(ours[rule.ours[0]])]
            else:
                result = rule.load([weights.read(actual[name]) for name in rule.theirs])
            for name, tensor in zip(rule.ours, result, strict=True):
                yield name, own(tensor.to(device=device, dtype=wide))

    fill(model, values())


def unchanged(model: Transformer, mapping: FamilyMapping, weights: Weights) -> int:
    """Turn a network back into the tensors that it was filled from, and compare them bit for bit.

    Returns:
        How many there are.

    Raises:
        CheckError: one differs.
    """
    names = actual_names(mapping, weights)
    written = save_weights(model, mapping, bare=False)
    for name, tensor in written.items():
        real = names.get(name)
        if real is None:  # stored under its other name
            real = next(names[tie.theirs] for tie in mapping.ties if tie.of == name and tie.theirs in names)
        if not torch.equal(weights.view(real).to(tensor.dtype), tensor.cpu()):
            raise CheckError(f"{weights.where}: {real} does not come back as it was")
    return len(written)


def save_weights(
    model: Transformer, mapping: FamilyMapping, keys: Mapping[str, Any] | None = None, *, bare: bool
) -> dict[str, Tensor]:
    """The network's tensors under the family's names and in its layout, ties left out.

    Args:
        model: the network.
        mapping: the family's.
        keys: of ``config.json``, for tensors that follow from it; None leaves those out.
        bare: whether it is the model without a head, whose names lack the base prefix.
    """
    parameters = dict(model.named_parameters())
    result: dict[str, Tensor] = {}

    def key(name: str) -> str:
        return name.removeprefix(mapping.base) if bare else name

    for rule in mapping.rules(model):
        parts = rule.save([parameters[name].detach() for name in rule.ours])
        for name, tensor in zip(rule.theirs, parts, strict=True):
            # Views into one packed parameter cannot be written to a file as they are.
            result[key(name)] = tensor.clone() if rule.steps else tensor
    for tie in mapping.ties:
        if tie.written and keys is not None:
            result[key(tie.theirs)] = result[key(tie.of)].clone()
    if keys is not None:
        dtype = next(iter(parameters.values())).dtype
        result.update({key(entry.theirs): entry.make(keys).to(dtype) for entry in mapping.computed})
    return result


def _gathered(weights: Weights, names: Sequence[str], runs: Sequence[tuple[int, int, int]]) -> Tensor:
    """Runs of rows of several tensors, one after the other: mapped where pages allow it, else copied once."""
    kinds = {weights.dtype(name) for name in names}
    if isinstance(weights, Shards) and len(kinds) == 1:
        pieces = [weights.piece(names[i], first, last) for i, first, last in runs]
        return joined(pieces, *kinds)
    rows = [last - first for _, first, last in runs]
    result = torch.empty((sum(rows), *weights.shape(names[0])[1:]), dtype=_widest(kinds))
    for part, (i, first, last) in zip(result.split(rows), runs, strict=True):
        part.copy_(weights.view(names[i])[first:last])
    return result


def _their_shapes(ours: Mapping[str, torch.Size], rules: Iterable[Rule]) -> dict[str, tuple[int, ...]]:
    """The shapes their tensors must have, found by running the rules backwards on empty tensors."""
    shapes: dict[str, tuple[int, ...]] = {}
    for rule in rules:
        found = [ours[name] for name in rule.ours]
        if rule.steps:
            found = [t.shape for t in rule.save([torch.empty(shape, device="meta") for shape in found])]
        for name, shape in zip(rule.theirs, found, strict=True):
            assert name not in shapes, name
            shapes[name] = tuple(shape)
    return shapes


def actual_names(mapping: FamilyMapping, weights: Weights) -> dict[str, str]:
    """Names as the mapping writes them, to the names in the file; a bare model's get the base prefix."""
    names = {_modern(name): name for name in weights.names()}
    if not mapping.base or any(name.startswith(mapping.base) for name in names):
        return names
    return {n if n.startswith(mapping.heads) else mapping.base + n: real for n, real in names.items()}


def _modern(name: str) -> str:
    """Files converted from TensorFlow call a norm's gain and bias gamma and beta."""
    stem, _, last = name.rpartition("LayerNorm.")
    return f"{stem}LayerNorm.{'weight' if last == 'gamma' else 'bias'}" if last in ("gamma", "beta") else name


def _without_ignored(mapping: FamilyMapping, weights: Weights, actual: Mapping[str, str]) -> dict[str, str]:
    kept: dict[str, str] = {}
    for name, real in actual.items():
        entry = next((e for e in mapping.ignored if fnmatch.fnmatchcase(name, e.pattern)), None)
        if entry is None:
            kept[name] = real
        elif entry.check is not None and (fault := entry.check(weights.read(real))):
            raise ArtifactError(f"{weights.where}: {name}: {fault}")
    return kept


def _without_ties(mapping: FamilyMapping, weights: Weights, actual: Mapping[str, str]) -> dict[str, str]:
    kept = dict(actual)
    for tie in mapping.ties:
        if tie.theirs not in kept:
            continue
        copy = kept.pop(tie.theirs)
        if tie.of not in kept:
            kept[tie.of] = copy
        elif weights.shape(copy) != weights.shape(kept[tie.of]) or not torch.equal(
            weights.view(copy), weights.view(kept[tie.of])
        ):
            raise ArtifactError(f"{weights.where}: {tie.theirs} differs from {tie.of}: {tie.why}")
    return kept


def _widest(kinds: Iterable[torch.dtype]) -> torch.dtype:
    result, *others = kinds
    for kind in others:
        result = torch.promote_types(result, kind)
    return result
