"""Rows of two matrices held against each other: which row of one is which of the other."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from isoform.verify.diagnose.parts import Linear, Part

ROUNDED = 1e-4
"""Above this, rows are too far apart to be looked up in one sorted list: each is held against all."""


@dataclasses.dataclass(eq=False)
class Rows:
    """How the rows of B's matrices stand in A's: B's row i is ``scale[i]`` times A's row ``index[i]``.

    Attributes:
        index: −1 where B's row is none of A's.
        scale: 1 where the row is the same.
    """

    index: Tensor
    scale: Tensor

    @property
    def complete(self) -> bool:
        """Every row was found, each another one."""
        return bool((self.index >= 0).all()) and len(self.index.unique()) == len(self.index)

    @property
    def plain(self) -> bool:
        """Nothing is permuted or scaled."""
        return self.complete and bool((self.index == torch.arange(len(self.index))).all()) and not self.scaled

    @property
    def scaled(self) -> bool:
        """Some rows are multiples."""
        return bool(((self.scale - 1).abs() > 1e-6).any())


def match_rows(a: Tensor, b: Tensor, tolerance: float = 2e-6) -> Rows:
    """Find each row of ``b`` among the rows of ``a``, up to a positive factor.

    Args:
        a: ``[n, width]``.
        b: ``[m, width]``.
        tolerance: how far two rows may be apart, as unit vectors: more where factors were folded into weights
            that were rounded afterwards.
    """
    index = torch.full((b.shape[0],), -1, dtype=torch.long)
    scale = torch.ones(b.shape[0], dtype=torch.float64)
    if a.shape[1:] != b.shape[1:] or a.shape[0] == 0:
        return Rows(index, scale)
    if a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b):
        return Rows(torch.arange(b.shape[0]), scale)
    a, b = a.double(), b.double()
    largest = a.abs().max().clamp(min=1e-30)
    if a.shape == b.shape and bool((a - b).abs().max() <= tolerance / 2 * largest):
        return Rows(torch.arange(b.shape[0]), scale)
    long_a, long_b = a.norm(dim=1), b.norm(dim=1)
    unit_a, unit_b = a / long_a.clamp(min=1e-30)[:, None], b / long_b.clamp(min=1e-30)[:, None]
    if tolerance > ROUNDED:
        nearest = (unit_b @ unit_a.t()).argmax(1)
        same = (unit_a[nearest] - unit_b).abs().amax(1) < tolerance
        index = torch.where(same, nearest, index)
        return _scaled(index, scale, long_a, long_b, tolerance)
    direction = torch.randn(a.shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    key_a, key_b = unit_a @ direction, unit_b @ direction
    order = key_a.argsort()
    at = torch.searchsorted(key_a[order], key_b)
    for shift in (0, -1, 1):
        candidate = order[(at + shift).clamp(0, len(order) - 1)]
        same = (unit_a[candidate] - unit_b).abs().amax(1) < 2e-6
        fresh = same & (index < 0)
        index = torch.where(fresh, candidate, index)
    return _scaled(index, scale, long_a, long_b, tolerance)


def inverse(rows: Rows) -> Rows:
    """How A's rows stand in B's, where every row was found."""
    index, scale = torch.empty_like(rows.index), torch.empty_like(rows.scale)
    index[rows.index], scale[rows.index] = torch.arange(len(index)), 1 / rows.scale
    return Rows(index, scale)


def _scaled(index: Tensor, scale: Tensor, long_a: Tensor, long_b: Tensor, tolerance: float) -> Rows:
    found = index >= 0
    scale[found] = long_b[found] / long_a[index[found]].clamp(min=1e-30)
    scale[(scale - 1).abs() < tolerance] = 1.0
    return Rows(index, scale)


def rows_of(parts: list[Part]) -> tuple[Tensor, Tensor]:
    """The rows and biases of some parts, one below the other."""
    weights = [_taken(p.linear.weight, p.columns) for p in parts]
    kept = [w for w in weights if w.shape[1] == weights[0].shape[1]]
    biases = [_taken(p.linear.bias, p.columns) for p in parts][: len(kept)]
    if len(kept) == 1:
        return kept[0], biases[0]
    return torch.cat(kept), torch.cat(biases)


def _taken(value: Tensor, rows: Tensor) -> Tensor:
    """Some rows, without a copy where they lie one after the other."""
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows) and bool((rows.diff() == 1).all()):
        return value[first : last + 1]
    return value[rows]


def whole(linears: list[Linear]) -> list[Part]:
    """All columns of some linear maps."""
    return [Part(linear, torch.arange(linear.weight.shape[0])) for linear in linears]
