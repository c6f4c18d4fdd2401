"""What one forward pass computed, as data: operations, what each read, and what it gave (R39, R41)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from isoform.verify.spool import Mapped

Geometry = tuple[tuple[int, ...], tuple[int, ...], int]
"""Sizes, strides and offset of a tensor in the memory it shares with others."""


@dataclasses.dataclass(frozen=True)
class Ref:
    """Where an argument came from: a node's output, a parameter or buffer, an input, or a constant."""

    kind: str  # "node" | "parameter" | "input" | "constant"
    name: str | int
    index: int = 0


@dataclasses.dataclass(eq=False)
class Node:
    """One operation.

    Attributes:
        number: its place in the order of execution.
        op: the operator's name without overload, e.g. ``"addmm"``.
        args: arguments in order; tensors as `Ref`, lists of them as lists, everything else as it is.
        kwargs: keyword arguments, likewise.
        value: the (first) output.
        module: dotted path of the innermost module that was running.
        source: file and line outside PyTorch that asked for it.
        call: the operator itself, to run it again; None where this PyTorch has none of its name.
        inplace: it wrote its result over its first argument.
    """

    number: int
    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Tensor
    module: str
    source: str
    call: Callable[..., Any] | None = None
    inplace: bool = False

    def refs(self) -> Iterator[Ref]:
        """Every tensor argument, in order."""
        yield from references(self.args)
        yield from references(tuple(self.kwargs.values()))


@dataclasses.dataclass(eq=False)
class Recording:
    """One forward pass.

    Attributes:
        subject: the module's class.
        nodes: all operations in order.
        parameters: parameters and buffers by name; tied ones under their first name. Those of the module
            itself: train it further and they move with it.
        ties: names that are one tensor.
        inputs: tensors that came from outside, by argument name.
        constants: other tensors that were used, by number.
        output: the node that made the result.
        reals: for each role ("target", "source") the name of the recorded input that holds ``[B, T]`` True =
            a real token.
        trained: names of the parameters; the others are buffers.
        contents: for each role the name of the recorded input that holds the ids or vectors.
        mapped: where values are that were too many for memory.
    """

    subject: str
    nodes: list[Node]
    parameters: dict[str, Tensor]
    ties: list[tuple[str, ...]]
    inputs: dict[str, Tensor]
    constants: dict[int, Tensor]
    output: Ref
    reals: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    contents: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    trained: frozenset[str] = frozenset()
    mapped: Mapped | None = dataclasses.field(default=None, repr=False)

    def release(self) -> None:
        """Let go of values that were looked at, where they can be read again."""
        if self.mapped is not None:
            self.mapped.release()

    def value(self, ref: Ref) -> Tensor:
        """The tensor a reference stands for."""
        if ref.kind == "node":
            return self.nodes[int(ref.name)].value
        if ref.kind == "parameter":
            return self.parameters[str(ref.name)]
        return self.inputs[str(ref.name)] if ref.kind == "input" else self.constants[int(ref.name)]

    @property
    def dtype(self) -> torch.dtype | None:
        """The coarsest precision that matrices are kept in."""
        kinds = {p.dtype for p in self.parameters.values() if p.is_floating_point() and p.dim() >= 2}
        return max(kinds, key=lambda k: torch.finfo(k).eps) if kinds else None

    def result(self) -> Tensor:
        """The module's main output."""
        return self.value(self.output)

    def users(self) -> dict[int, list[int]]:
        """For each node the nodes that read its output."""
        users: dict[int, list[int]] = {node.number: [] for node in self.nodes}
        for node in self.nodes:
            for ref in node.refs():
                if ref.kind == "node" and node.number not in users[int(ref.name)]:
                    users[int(ref.name)].append(node.number)
        return users

    def save(self, path: str | Path) -> None:
        """Write it as one safetensors file, whole or not at all; see `isoform.verify.recording_file`."""
        from isoform.verify.recording_file import save

        save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Recording:
        """Read a recording; tensors stay in the file until they are looked at.

        Raises:
            DataError: no such file, or not a recording.
        """
        from isoform.verify.recording_file import load

        return load(path)


def laid_out(recording: Recording, reference: Recording) -> Recording:
    """The recording, or with its axes of batch and time exchanged if it read the reference's content so."""
    inputs = dict(recording.inputs)
    for role, name in recording.reals.items():
        content, other = recording.contents.get(role, ""), reference.contents.get(role, "")
        theirs, ours = inputs.get(content), reference.inputs.get(other)
        if theirs is None or ours is None or theirs.dim() != ours.dim() or theirs.dim() < 2:
            continue
        turned = theirs.transpose(0, 1)
        fits = turned.shape == ours.shape and inputs[name].shape == theirs.shape[:2]
        if fits and torch.equal(turned.to(ours), ours) and not torch.equal(theirs.reshape(ours.shape), ours):
            inputs[name] = inputs[name].t()
    return dataclasses.replace(recording, inputs=inputs)


def references(value: Any) -> Iterator[Ref]:
    """Every `Ref` in nested lists of arguments."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from references(item)


def rewritten(old: Tensor, new: Tensor, shape: Geometry, part: Geometry) -> Tensor:
    """The value of a tensor after another one in the same memory was written to in place.

    Args:
        old: its value before.
        new: what the other one holds now.
        shape: sizes, strides and offset of the tensor in the memory.
        part: those of the other one.
    """
    spans = (sum((s - 1) * t for s, t in zip(g[0], g[1], strict=True)) + g[2] + 1 for g in (shape, part))
    memory = old.new_zeros(max(spans))
    memory.as_strided(*shape).copy_(old)
    memory.as_strided(*part).copy_(new)
    return memory.as_strided(*shape).clone()


def geometry(tensor: Tensor) -> Geometry:
    """Where a tensor lies in its memory."""
    return tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())


def owns(tensor: Tensor) -> bool:
    """Whether a tensor is all of its memory, each element once, in whatever order of its axes."""
    whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    if not whole or tensor.storage_offset() or tensor.is_conj() or tensor.is_neg():
        return False
    step = 1
    for stride, size in sorted((t, s) for s, t in zip(tensor.shape, tensor.stride(), strict=True) if s > 1):
        if stride != step:
            return False
        step *= size
    return True


def flattened(tensor: Tensor) -> Tensor:
    """The memory of a tensor that owns it, in order."""
    return tensor.as_strided((tensor.numel(),), (1,), 0)


def seen_through(flat: Tensor, dtype: torch.dtype, place: Geometry) -> Tensor:
    """A tensor of the given type and place in the memory of a flat one."""
    base = flat if flat.dtype == dtype else flat.view(dtype)
    sizes, strides, offset = place
    return base.as_strided(sizes, strides, base.storage_offset() + offset)
