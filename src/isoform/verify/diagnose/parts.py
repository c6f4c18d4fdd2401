"""The parts of a Transformer: linear maps, attentions, feed-forward networks, choices of experts."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(eq=False)
class Box:
    """A block of a value: one expert's share of what is computed for all of them.

    Attributes:
        sets: for each axis the places that belong to it.
        tokens: the axes of tokens, one or two.
        features: that of features; all other axes have one place.
    """

    sets: tuple[Tensor, ...]
    tokens: tuple[int, ...]
    features: int

    def take(self, value: Tensor) -> Tensor:
        """The block of a value, ``[tokens, features]``."""
        block = value[torch.meshgrid(*self.sets, indexing="ij")].permute(self._order())
        return block.reshape(-1, len(self.sets[self.features]))

    def put(self, value: Tensor, block: Tensor) -> Tensor:
        """The value with another block."""
        new, order = value.clone(), self._order()
        ordered = block.reshape([len(self.sets[axis]) for axis in order])
        back = [order.index(axis) for axis in range(len(order))]
        new[torch.meshgrid(*self.sets, indexing="ij")] = ordered.permute(back)
        return new

    def _order(self) -> list[int]:
        others = [axis for axis in range(len(self.sets)) if axis not in (*self.tokens, self.features)]
        return [*others, *self.tokens, self.features]


@dataclasses.dataclass(eq=False)
class Linear:
    """One application of a matrix to content.

    Attributes:
        node: the product.
        out: where its result with the bias stands.
        read: the node it reads.
        weight: ``[out, in]``.
        bias: ``[out]``, zero where there is none.
        has_bias: whether there is one.
        names: parameters that the matrix is made of.
        bias_names: those that the bias is made of.
        box: where its result stands in that node's value (for a map that is read: in what it reads), if it
            is one of several experts' that are computed together.
    """

    node: int
    out: int
    read: int
    weight: Tensor
    bias: Tensor
    has_bias: bool
    names: list[str]
    bias_names: list[str]
    role: str = ""
    box: Box | None = None


@dataclasses.dataclass(eq=False)
class Part:
    """Some columns of a linear map's result, those that an attention operand is made of."""

    linear: Linear
    columns: Tensor


@dataclasses.dataclass(eq=False)
class Site:
    """One attention.

    Attributes:
        softmax: the node of the softmax.
        logits: its argument, the biased and masked scores, before anything that is the same for all keys.
        scores: the product of queries and keys.
        query, key: operands of that product; ``transposed`` where the product was keys by queries.
        mix: the product of the weights with the values.
        value: its other operand.
        out: the linear map that reads the result.
        q, k, v: where the operands come from.
    """

    index: int
    softmax: int
    logits: int
    scores: int
    query: int
    key: int
    key_columns: bool
    mix: int
    value: int
    weights: int
    out: Linear | None
    q: list[Part]
    k: list[Part]
    v: list[Part]
    cross: bool = False

    def parts(self) -> list[tuple[str, Part]]:
        """Queries, keys and values in this order."""
        return [
            (name, part) for name, parts in (("q", self.q), ("k", self.k), ("v", self.v)) for part in parts
        ]


@dataclasses.dataclass(eq=False)
class Inner:
    """A linear map that reads other linear maps directly: the second one of a feed-forward network.

    Attributes:
        expert: its number among experts that are computed together.
        parts: the columns of the maps it reads that belong to it: all, if none are an attention's.
    """

    index: int
    out: Linear
    sources: list[Linear]
    expert: int | None = None
    parts: list[Part] = dataclasses.field(default_factory=list[Part])

    def __post_init__(self) -> None:
        self.parts = self.parts or [Part(s, torch.arange(s.weight.shape[0])) for s in self.sources]

    @property
    def whose(self) -> str:
        """Words for a place."""
        return "" if self.expert is None else f" of expert {self.expert}"


@dataclasses.dataclass(eq=False)
class Router:
    """A choice of experts for each token.

    Attributes:
        linear: the map to one score an expert.
        choice: the node of the choice (top-k, sort, argmax).
        end: the node where all chosen experts' results have been put together.
        experts: their linear maps.
    """

    linear: Linear
    choice: int
    end: int
    experts: list[Linear]
