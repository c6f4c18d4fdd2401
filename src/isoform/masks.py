"""Attention masks whose truth direction is their type (R22).

``Allowed``: True = may read. ``Forbidden``: True = must not read. ``Additive``: 0 = may read, -inf (or the
lowest number of a dtype) = must not. One cannot be passed for another; conversions are named.
"""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from isoform.errors import ShapeError


@dataclasses.dataclass(frozen=True, eq=False)
class Allowed:
    """``matrix[b, i, j]`` True: query i of row b may read key j. Shape ``[B | 1, T, S]``."""

    matrix: Bool[Tensor, "rows query key"]

    def __post_init__(self) -> None:
        _check(self.matrix, "Allowed")

    def __and__(self, other: Allowed) -> Allowed:
        if not isinstance(other, Allowed):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"Allowed & {type(other).__name__}: convert with .allowed() first")
        return Allowed(self.matrix & other.matrix)

    def allowed(self) -> Allowed:
        """Itself."""
        return self

    def forbidden(self) -> Forbidden:
        """The same rule, said the other way round."""
        return Forbidden(~self.matrix)

    def additive(self, dtype: torch.dtype) -> Additive:
        """0 where reading is allowed, -inf elsewhere."""
        zero = torch.zeros((), dtype=dtype, device=self.matrix.device)
        return Additive(torch.where(self.matrix, zero, float("-inf")))

    def sdpa(self) -> Bool[Tensor, "rows 1 query key"]:
        """For `torch.nn.functional.scaled_dot_product_attention`: True takes part, a head axis of one."""
        return self.matrix[:, None]

    def multihead(self, n_heads: int) -> Bool[Tensor, "rows_heads query key"]:
        """For `torch.nn.MultiheadAttention(attn_mask=…)`: True is *not* allowed, heads folded into rows."""
        matrix = ~self.matrix
        return matrix[0] if matrix.shape[0] == 1 else matrix.repeat_interleave(n_heads, 0)

    def hugging_face(self, dtype: torch.dtype) -> Float[Tensor, "rows 1 query key"]:
        """The additive four-dimensional form of Hugging Face models: the dtype's lowest number, not -inf."""
        zero = torch.zeros((), dtype=dtype, device=self.matrix.device)
        return torch.where(self.matrix, zero, torch.finfo(dtype).min)[:, None]

    def is_causal(self) -> bool:
        """Whether every row is exactly the lower triangle; read from the matrix itself (R22)."""
        t, s = self.matrix.shape[-2:]
        triangle = torch.ones(t, s, dtype=torch.bool, device=self.matrix.device).tril()
        return t == s and bool((self.matrix == triangle).all())

    def grid(self, *, row: int = 0, marks: tuple[str, str] = ("■", "·")) -> str:
        """One row of the batch as text: queries down, keys across, ``marks`` for (may, must not) read."""
        yes, no = marks
        return "\n".join(" ".join(yes if cell else no for cell in line) for line in self.matrix[row].tolist())

    def __str__(self) -> str:
        return "\n\n".join(self.grid(row=b) for b in range(self.matrix.shape[0]))


@dataclasses.dataclass(frozen=True, eq=False)
class Forbidden:
    """``matrix[b, i, j]`` True: query i of row b must not read key j. Shape ``[B | 1, T, S]``."""

    matrix: Bool[Tensor, "rows query key"]

    def __post_init__(self) -> None:
        _check(self.matrix, "Forbidden")

    def allowed(self) -> Allowed:
        """The same rule, said the other way round."""
        return Allowed(~self.matrix)


@dataclasses.dataclass(frozen=True, eq=False)
class Additive:
    """A mask to be added to scores. Shape ``[B | 1, T, S]``, 0 or at most half of the dtype's lowest number.

    Raises:
        ShapeError: other values: a 0/1 mask added to scores hides nothing, and a bias is not a mask.
    """

    matrix: Float[Tensor, "rows query key"]

    def __post_init__(self) -> None:
        _check(self.matrix, "Additive")
        if not self.matrix.is_floating_point():
            raise ShapeError(f"Additive has dtype {self.matrix.dtype}, expected a floating-point mask")
        fine = (self.matrix == 0) | (self.matrix <= torch.finfo(self.matrix.dtype).min / 2)
        if not bool(fine.all()):
            value = self.matrix[~fine][0].item()
            raise ShapeError(
                f"Additive holds {value:g}; a mask to be added is 0 where reading is allowed, -inf elsewhere"
            )

    def allowed(self) -> Allowed:
        """The rule as booleans."""
        return Allowed(self.matrix == 0)


def from_key_padding(real: Bool[Tensor, "batch key"], queries: int) -> Allowed:
    """A mask over keys alone, as Hugging Face's ``attention_mask`` made bool: True = a real token."""
    return Allowed(real[:, None, :].expand(-1, queries, -1))


def _check(matrix: Tensor, name: str) -> None:
    if matrix.dim() != 3:
        raise ShapeError(f"{name} has shape {list(matrix.shape)}, expected [batch or 1, queries, keys]")
    if name != "Additive" and matrix.dtype != torch.bool:
        raise ShapeError(f"{name} has dtype {matrix.dtype}, expected bool")
