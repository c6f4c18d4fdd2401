"""Affine maps, and several independent ones of one input in one matrix product (R2, R9)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from isoform.errors import ShapeError
from isoform.nn.products import Product


def refuse_width(x: Tensor, width: int, what: str) -> NoReturn:
    """Say that the last axis of an input does not fit, naming both shapes (R1).

    Raises:
        ShapeError: always. The caller compares, so that the message is only made when it is needed.
    """
    raise ShapeError(f"input of shape {list(x.shape)} does not fit {what}: its last axis must be {width}")


def lookup(
    rows: Int[Tensor, "*batch"], table: Float[Tensor, "n width"], what: str
) -> Float[Tensor, "*batch width"]:
    """Rows of a table.

    Raises:
        ShapeError: a row that the table does not have (on the CPU; elsewhere the device reports it).
    """
    try:
        return F.embedding(rows, table)
    except IndexError:
        worst = rows.max() if int(rows.max()) >= table.shape[0] else rows.min()
        raise ShapeError(f"{what} {int(worst)} is not in a table of {table.shape[0]} rows") from None


class Linear(nn.Linear):
    """x W + b, stored [out, in]; ``product`` computes it where the weight is kept in another form."""

    product: Product | None = None

    def reset_parameters(self) -> None:
        """Draw nothing: first values are `isoform.nn.initialise`'s, or a checkpoint's."""
        nn.init.zeros_(self.weight)
        if self.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
            nn.init.zeros_(self.bias)

    def forward(self, input: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch out"]:
        """Map the last axis.

        Raises:
            ShapeError: the input has another width (R1).
        """
        if input.shape[-1] != self.in_features:
            refuse_width(input, self.in_features, f"a weight of shape {list(self.weight.shape)}")
        if self.product is not None:
            return self.product(input)
        return F.linear(input, self.weight, self.bias)


class Packed(nn.Module):
    """Named projections whose weights lie one after the other in a single parameter.

    They stay independent: each occupies its own rows, and `part` gives a view of them. The bias parameter
    holds the rows of those projections that have one.

    Args:
        in_features: width of the input.
        parts: for each projection its output width, in the order they are stored.
        bias: for each projection whether it has a bias.
    """

    product: Product | None = None

    def __init__(self, in_features: int, parts: Mapping[str, int], bias: Mapping[str, bool]) -> None:
        super().__init__()
        self.in_features = in_features
        self.parts = dict(parts)
        self.biased = tuple(name for name in parts if bias[name])
        self.weight = nn.Parameter(torch.empty(sum(parts.values()), in_features))
        n_bias = sum(parts[name] for name in self.biased)
        self.bias = nn.Parameter(torch.zeros(n_bias)) if n_bias else None

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch total"]:
        """All projections, concatenated in the order of ``parts``.

        Raises:
            ShapeError: the input has another width (R1).
        """
        if x.shape[-1] != self.in_features:
            refuse_width(x, self.in_features, f"a weight of shape {list(self.weight.shape)}")
        if self.product is not None:
            return self.product(x)
        return F.linear(x, self.weight, self.full_bias())

    def project(self, x: Float[Tensor, "*batch width"]) -> tuple[Tensor, ...]:
        """All projections, each on its own."""
        return self(x).split(tuple(self.parts.values()), dim=-1)

    def full_bias(self) -> Tensor | None:
        """The bias with zeros for the projections that have none."""
        if self.bias is None or len(self.biased) == len(self.parts):
            return self.bias
        pieces = dict(zip(self.biased, self.bias.split([self.parts[n] for n in self.biased]), strict=True))
        return torch.cat(
            [pieces[n] if n in pieces else self.bias.new_zeros(w) for n, w in self.parts.items()]
        )

    def part(self, name: str) -> Float[Tensor, "out width"]:
        """A view of one projection's weight."""
        return self.weight.narrow(0, _offset(self.parts, name), self.parts[name])

    def part_bias(self, name: str) -> Float[Tensor, " out"] | None:
        """A view of one projection's bias; None where it has none."""
        if self.bias is None or name not in self.biased:
            return None
        return self.bias.narrow(0, _offset({n: self.parts[n] for n in self.biased}, name), self.parts[name])

    def extra_repr(self) -> str:
        return (
            f"{self.in_features} → "
            + ", ".join(f"{n} {w}" for n, w in self.parts.items())
            + f", bias={self.biased}"
        )


def _offset(parts: Mapping[str, int], name: str) -> int:
    names = list(parts)
    return sum(parts[n] for n in names[: names.index(name)])
