"""What every attention of one kind shares in one forward pass, computed once for all layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from isoform.lowering import Lowered

Pair = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Bias(Protocol):
    """What positions add to the scores."""

    @property
    def trained(self) -> bool:
        """Whether it has a gradient."""
        ...

    def dense(self, dtype: torch.dtype) -> Float[Tensor, "rows h query key"]:
        """The bias of every (query, key) pair, ``[B | 1, h, T, S]``."""
        ...

    def by_pair(self, dtype: torch.dtype) -> Pair:
        """The bias as a function of (batch, head, query, key) indices, in FlexAttention's form."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Reading:
    """What every attention of one kind shares in one forward pass.

    Args:
        lowered: who may read whom.
        rotary: cosines and sines of the queries' positions; None: no rotation.
        rotary_keys: those of the stored keys, where rotation happens at reading time (dynamic NTK).
        bias: added to the scores (ALiBi, distance buckets).
        slots: ``[B, T]`` where new keys go in a cache.
        visible: how many slots of the cache are read.
        fresh: the cache was empty, so the new keys are all there are.
        start: the slot of every row's first new key, where that is one number known on the host.
    """

    lowered: Lowered
    rotary: tuple[Tensor, Tensor] | None = None
    rotary_keys: tuple[Tensor, Tensor] | None = None
    bias: Bias | None = None
    slots: Int[Tensor, "batch length"] | None = None
    visible: int | None = None
    fresh: bool = False
    start: int | None = None
    _built: dict[tuple[str, torch.dtype], Tensor | None] = dataclasses.field(
        default_factory=dict, init=False, repr=False
    )

    def biased(self, dtype: torch.dtype) -> Float[Tensor, "rows h query key"] | None:
        """The bias alone; None where there is none."""
        bias = self.bias
        return None if bias is None else self._once("bias", dtype, lambda: bias.dense(dtype))

    def masked(self, dtype: torch.dtype) -> Float[Tensor, "rows 1 query key"] | None:
        """The whole visibility as a tensor to add to the scores; None when everything is allowed.

        What must not be read gets half of the lowest finite number: added to any score it underflows to a
        weight of exactly zero, and a query that reads nothing stays finite until it is zeroed (R4).
        """
        return self._once("mask", dtype, lambda: _additive(self.lowered.written_out, dtype))

    def added(self, dtype: torch.dtype) -> Float[Tensor, "rows h query key"] | None:
        """All that a kernel with a causal flag still has to add; the flag counts only where this is None or
        a mask, for a bias brings the whole visibility with it."""
        if self.bias is None:
            return self._once("left", dtype, lambda: _additive(self.lowered.mask, dtype))
        return self._once("added", dtype, lambda: _sum(self.biased(dtype), self.masked(dtype)))

    def _once(self, name: str, dtype: torch.dtype, build: Callable[[], Tensor | None]) -> Tensor | None:
        if (name, dtype) not in self._built:
            self._built[name, dtype] = build()
        return self._built[name, dtype]


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None:
        return None
    return forbidden(~mask, dtype)


def forbidden(where: Bool[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """What is added to the scores of places that must not be read."""
    return torch.zeros_like(where, dtype=dtype).masked_fill_(where, torch.finfo(dtype).min / 2)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b
