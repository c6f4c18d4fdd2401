"""Reversible operations between two layouts of the same numbers, exact in both directions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from isoform import config


class Operation(Protocol):
    """One reversible step. ``load`` goes from the foreign layout to ours, ``save`` back."""

    def load(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Theirs to ours."""
        ...

    def save(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Ours to theirs."""
        ...


@dataclasses.dataclass(frozen=True)
class Transpose:
    """Input-major weights ([in, out]) against ours ([out, in])."""

    def load(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [t.t() for t in tensors]

    def save(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [t.t() for t in tensors]


@dataclasses.dataclass(frozen=True)
class Concatenate:
    """Several tensors there are the rows of one here; ``sizes`` are their numbers of rows."""

    sizes: tuple[int, ...]

    def load(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(tensors))]

    def save(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        (whole,) = tensors
        return list(whole.split(self.sizes))


@dataclasses.dataclass(frozen=True)
class Divide:
    """The rows of one tensor there are several here; ``sizes`` are their numbers of rows."""

    sizes: tuple[int, ...]

    def load(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        (whole,) = tensors
        return list(whole.split(self.sizes))

    def save(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(tensors))]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Row i here is row ``order[i]`` there."""

    order: tuple[int, ...]

    def load(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [t[torch.tensor(self.order, device=t.device)] for t in tensors]

    def save(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [t[torch.tensor(self.order, device=t.device).argsort()] for t in tensors]


@dataclasses.dataclass(frozen=True)
class Experts:
    """Each expert's parts there (gate, up), concatenated and stacked on an axis of experts here."""

    sizes: tuple[int, ...]

    def load(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        n = len(self.sizes)
        return [torch.stack([torch.cat(list(tensors[i : i + n])) for i in range(0, len(tensors), n)])]

    def save(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        (stacked,) = tensors
        return [part for expert in stacked for part in expert.split(self.sizes)]


@dataclasses.dataclass(frozen=True)
class Reshape:
    """The same numbers in the same order under another shape."""

    ours: tuple[int, ...]
    theirs: tuple[int, ...]

    def load(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [t.reshape(self.ours) for t in tensors]

    def save(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [t.reshape(self.theirs) for t in tensors]


def runs(steps: Sequence[Operation], heights: Sequence[int]) -> list[tuple[int, int, int]] | None:
    """The rows here as runs of rows there, where that is all that the steps do; else None.

    Args:
        steps: from their tensors to one of ours.
        heights: how many rows each tensor there has.

    Returns:
        For each run the tensor's number, its first row and the row behind its last.
    """
    if len(steps) != 1:
        return None
    (step,) = steps
    if isinstance(step, Concatenate | Experts):
        return [(i, 0, height) for i, height in enumerate(heights)]
    if isinstance(step, Rows):
        starts = [i for i, row in enumerate(step.order) if i == 0 or row != step.order[i - 1] + 1]
        ends = [*starts[1:], len(step.order)]
        return [(0, step.order[i], step.order[j - 1] + 1) for i, j in zip(starts, ends, strict=True)]
    return None


def per_head(cfg: config.Attention) -> tuple[int, ...]:
    """Fused rows ordered head by head, within a head query, key, value (GPT-NeoX, BLOOM)."""
    h, w = cfg.n_heads, cfg.head_width
    return _blocks([head * 3 + part for part in range(3) for head in range(h)], w)


def per_group(cfg: config.Attention) -> tuple[int, ...]:
    """Fused rows ordered by key/value head: its queries, its key, its value (Falcon 40B)."""
    kv, w = cfg.n_kv_heads, cfg.head_width
    size = cfg.n_heads // kv
    queries = [group * (size + 2) + i for group in range(kv) for i in range(size)]
    keys = [group * (size + 2) + size for group in range(kv)]
    values = [group * (size + 2) + size + 1 for group in range(kv)]
    return _blocks([*queries, *keys, *values], w)


def thirds(cfg: config.Attention) -> tuple[int, ...]:
    """Fused rows: all queries, all keys, all values, as here."""
    return tuple(range((cfg.n_heads + 2 * cfg.n_kv_heads) * cfg.head_width))


def interleaved_to_half(n_heads: int, head_width: int, rotary_width: int) -> tuple[int, ...]:
    """Rows of a query or key projection for the half layout, taken from the interleaved one.

    Channel pair (2i, 2i + 1) becomes (i, i + width/2); channels that do not rotate stay.
    """
    half = rotary_width // 2
    within = [2 * i for i in range(half)] + [2 * i + 1 for i in range(half)]
    within += list(range(rotary_width, head_width))
    return tuple(head * head_width + i for head in range(n_heads) for i in within)


def _blocks(order: Sequence[int], width: int) -> tuple[int, ...]:
    return tuple(block * width + i for block in order for i in range(width))
