"""The parts of a Transformer: linear maps, attentions, feed-forward networks, choices of experts."""

from __future__ import annotations

import dataclasses

from torch import Tensor


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
    """A linear map that reads other linear maps directly: the second one of a feed-forward network."""

    index: int
    out: Linear
    sources: list[Linear]


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
