"""A stack of layers under one visibility. What layers share in a pass is computed here, once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from isoform import config
from isoform.config.positions import BY_LENGTH
from isoform.nn.attention import Attention
from isoform.nn.biases import AlibiBias, RelativeBias
from isoform.nn.cache import Cache
from isoform.nn.capture import tap
from isoform.nn.dropout import dropout
from isoform.nn.layer import Layer, ParallelLayer, layer
from isoform.nn.norms import norm
from isoform.nn.positions import rotary_table
from isoform.nn.reading import Reading
from isoform.places import Places
from isoform.visibility import (
    Bidirectional,
    Causal,
    Cross,
    Documents,
    Padding,
    Prefix,
    Visibility,
    Window,
)

RULES: dict[str, Visibility] = {
    "bidirectional": Bidirectional() & Padding() & Documents(),
    "causal": Causal() & Padding() & Documents(),
    "prefix": Prefix() & Padding() & Documents(),
}
CROSS = Cross() & Padding()
Kind = tuple[int | None, config.Rotary | config.Alibi | config.RelativeBuckets | config.NoPositions, int]


@dataclasses.dataclass(frozen=True, eq=False)
class Memory:
    """What an encoder leaves for the decoder: states ``[B, S, d]`` and where the source tokens stand."""

    hidden: Float[Tensor, "batch source d_model"]
    places: Places


@dataclasses.dataclass(frozen=True, eq=False)
class Sides:
    """The places and positions of one pass.

    Args:
        query: where the new tokens stand.
        key: where everything readable stands; the same object as ``query`` without a cache.
        positions: ``[rows, T]`` positions of the new tokens, as the encoding counts them.
        slots: ``[B, T]`` where their keys go in the cache.
        fresh: the cache holds nothing yet, so the new keys are all there are.
    """

    query: Places
    key: Places
    positions: Int[Tensor, "rows length"]
    slots: Int[Tensor, "batch length"] | None = None
    fresh: bool = False


class Stack(nn.Module):
    """Layers, the tables they share, and the final norm."""

    def __init__(self, cfg: config.Stack, d_model: int) -> None:
        super().__init__()
        self.cfg = cfg
        own = {i: layer(cfg.layer_at(i), d_model) for i in range(cfg.n_layers) if cfg.owner(i) == i}
        self.layers = nn.ModuleList(own[cfg.owner(i)] for i in range(cfg.n_layers))
        self.final_norm = norm(cfg.final_norm, d_model)
        each: list[Kind] = [
            (layer.attention.window, layer.attention.positions, layer.attention.n_heads)
            for layer in cfg.layers()
        ]
        self.kinds = list(dict.fromkeys(each))  # layers of one kind share their masks, tables and biases
        self.kind_of = [self.kinds.index(kind) for kind in each]
        buckets = [(p, h) for _, p, h in self.kinds if isinstance(p, config.RelativeBuckets)]
        self.relative_bias = RelativeBias(*buckets[0]) if buckets else None

    def forward(
        self,
        x: Float[Tensor, "batch length d_model"],
        sides: Sides,
        *,
        visibility: Visibility | None = None,
        memory: Memory | None = None,
        cross: Visibility | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "batch length d_model"]:
        """Run all layers and the final norm.

        Args:
            x: the embedded tokens.
            sides: where they stand.
            visibility: who may read whom; default: the configuration's, with padding and documents.
            memory: the source, for layers with cross-attention.
            cross: what of the source may be read; default: every real token.
            cache: keys and values of the tokens before.
        """
        rule = RULES[self.cfg.visibility] if visibility is None else visibility
        readings = [self._reading(kind, sides, rule, x.dtype, cache) for kind in self.kinds]
        crossing = self._crossing(sides, memory, cross, cache)
        for i, block in enumerate(self.layers):
            source = cache.memory[i] if cache is not None and cache.memory is not None else None
            if source is None and memory is not None:
                source = memory.hidden
            x = block(
                x, readings[self.kind_of[i]], crossing, source, None if cache is None else cache.layers[i]
            )
        x = self.final_norm(x)
        return tap(self, "output", dropout(x, self.cfg.final_dropout, self.training))

    def blocks(self) -> list[Layer | ParallelLayer]:
        """The layers, typed."""
        return list(self.layers)  # pyright: ignore[reportReturnType]

    def each_attention(self, change: Callable[[Attention], None]) -> None:
        """Apply a change to every attention module of the stack."""
        for module in self.modules():
            if isinstance(module, Attention):
                change(module)

    def _reading(
        self, kind: Kind, sides: Sides, rule: Visibility, dtype: torch.dtype, cache: Cache | None
    ) -> Reading:
        window, positions, n_heads = kind
        if window is not None:
            rule = rule & Window(window, "both" if self.cfg.visibility == "bidirectional" else "past")
        query, key = sides.query, sides.key
        rotary = rotary_keys = bias = None
        if isinstance(positions, config.Rotary):
            dynamic = isinstance(positions.scaling, BY_LENGTH)
            lengths = self._lengths(sides) if dynamic else None
            rotary = rotary_table(positions, sides.positions, lengths, dtype)
            if dynamic and cache is not None:
                # The frequencies change as the row grows: keys are stored as they are and turned when read.
                keys = sides.positions if sides.fresh else key.index
                rotary_keys = rotary_table(positions, keys, lengths, dtype)
        elif isinstance(positions, config.Alibi):
            bias = AlibiBias(positions, n_heads, query.index, key.index)
        elif isinstance(positions, config.RelativeBuckets):
            assert self.relative_bias is not None
            bias = self.relative_bias(query.index, key.index)
        return Reading(
            lowered=rule.lower(query, key, reads_itself=True),
            rotary=rotary,
            rotary_keys=rotary_keys,
            bias=bias,
            slots=sides.slots,
            visible=None if cache is None else key.length,
            fresh=sides.fresh,
            start=0 if sides.fresh and cache is not None else query.start,
        )

    def _lengths(self, sides: Sides) -> Int[Tensor, " rows"]:
        """How long each row is, the new tokens included."""
        if sides.query.real is None:
            return sides.positions.amax(-1) + 1
        return torch.where(sides.query.real, sides.positions, 0).amax(-1) + 1

    def _crossing(
        self, sides: Sides, memory: Memory | None, cross: Visibility | None, cache: Cache | None
    ) -> Reading | None:
        places = memory.places if memory is not None else cache.memory_places if cache is not None else None
        if places is None:
            return None
        return Reading(lowered=(CROSS if cross is None else cross).lower(sides.query, places))
