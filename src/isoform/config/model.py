"""The architecture of a whole network as one frozen value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import model_validator

from isoform.config.base import Count, Flag, Frozen, Nullable
from isoform.config.embedding import Embedding, Projection
from isoform.config.heads import Head, Pooler, PoolingHead, SequenceHead, TaggingHead, TokenHead, Transform
from isoform.config.parts import Experts, Norm, Rotary
from isoform.config.stack import Layer, Stack, Variant

__all__ = [
    "Embedding",
    "Head",
    "Layer",
    "ModelConfig",
    "Pooler",
    "PoolingHead",
    "Projection",
    "SequenceHead",
    "Stack",
    "TaggingHead",
    "TokenHead",
    "Transform",
    "Variant",
]


class ModelConfig(Frozen):
    """A whole network.

    Encoder only: ``encoder`` set. Decoder only (causal or prefix): ``decoder`` set, its layers without
    cross-attention. Encoder–decoder: both set, decoder layers with cross-attention, ``source`` set (R18).
    """

    format: Literal[1] = 1
    """Version of this format."""
    d_model: Count
    """Width of the residual stream."""
    embedding: Embedding
    """The embedding of the only stream, or of the target."""
    source: Embedding | None = None
    """The embedding of the source; set exactly when there is an encoder and a decoder."""
    tie_source: Flag = False
    """Whether the source shares the target's table (R27). All else stays each stream's own."""
    encoder: Stack | None = None
    """The encoder's layers."""
    decoder: Stack | None = None
    """The decoder's layers."""
    head: Nullable[Head]
    """What is read off the last states; must be written, also when there is none."""
    zero_eps: Flag = False
    """Allows norms with eps 0, undefined on constant vectors; only for the hand-worked example (R5)."""

    @model_validator(mode="before")
    @classmethod
    def _not_a_preset(cls, data: Any) -> Any:
        if isinstance(data, dict) and "preset" in data:
            raise ValueError("preset: expand it first (isoform.presets, or [model] in a run file)")
        return data

    @model_validator(mode="after")
    def _consistent(self) -> ModelConfig:
        if self.encoder is None and self.decoder is None:
            raise ValueError("set encoder, decoder or both")
        both = self.encoder is not None and self.decoder is not None
        if both != (self.source is not None):
            raise ValueError("source is needed exactly when both encoder and decoder are set")
        if self.decoder is not None and (self.decoder.layer.cross_attention is not None) != both:
            raise ValueError(
                "decoder layers need cross_attention: there is an encoder"
                if both
                else "decoder layers have cross_attention but there is no encoder to read"
            )
        if self.encoder is not None and self.encoder.layer.cross_attention is not None:
            raise ValueError("encoder layers cannot have cross_attention")
        if both and self.decoder is not None and self.decoder.visibility == "bidirectional":
            raise ValueError("decoder.visibility 'bidirectional' would let a target read itself")
        for name, table in (("embedding", self.embedding), ("source", self.source)):
            if table is not None:
                self._check_table(name, table)
        self._check_source()
        self._check_head(both)
        self._check_eps()
        return self

    def _check_eps(self) -> None:
        for path, norm in _norms(self):
            if norm.eps == 0 and not self.zero_eps:
                raise ValueError(
                    f"{path}.eps is 0, which has no value on constant vectors; expected eps > 0 (R5)"
                )

    def _check_table(self, name: str, table: Embedding) -> None:
        if table.width != self.d_model and table.projection is None:
            raise ValueError(
                f"{name}.width {table.width} differs from d_model {self.d_model}: a projection is needed"
            )
        positions, width = table.positions, table.inner_width(self.d_model)
        if positions.kind == "sinusoidal" and positions.spacing == "half_width_minus_one" and width < 4:
            raise ValueError(f"{name}.positions: half_width_minus_one needs at least 4 channels, not {width}")

    def _check_source(self) -> None:
        if not self.tie_source:
            return
        if self.source is None:
            raise ValueError("tie_source is set but there is no source")
        if self.source.vocabulary != self.embedding.vocabulary:
            raise ValueError(
                f"tie_source: source reads vocabulary {self.source.vocabulary!r}, target "
                f"{self.embedding.vocabulary!r}; a shared row must mean the same token"
            )
        for name in ("vocab_size", "width"):
            mine, other = getattr(self.source, name), getattr(self.embedding, name)
            if mine != other:
                raise ValueError(f"tie_source: source.{name} is {mine}, embedding.{name} is {other}")

    def _check_head(self, both: bool) -> None:
        head = self.head
        if isinstance(head, TokenHead):
            if head.tied and head.transform is None and self.embedding.width != self.d_model:
                raise ValueError(
                    f"a tied head needs a transform from d_model {self.d_model} "
                    f"to embedding.width {self.embedding.width}"
                )
        elif head is not None and both:
            raise ValueError(f"head {head.kind!r} is for a single stack, not for an encoder–decoder")

    @property
    def structure(self) -> Literal["encoder", "decoder", "encoder-decoder"]:
        """Which stacks there are."""
        if self.encoder is None:
            return "decoder"
        return "encoder" if self.decoder is None else "encoder-decoder"

    @property
    def stack(self) -> Stack:
        """The stack whose states the head reads."""
        stack = self.decoder or self.encoder
        assert stack is not None
        return stack

    def has_experts(self) -> bool:
        """Whether any layer routes tokens to experts."""
        stacks = [s for s in (self.encoder, self.decoder) if s is not None]
        return any(isinstance(layer.feed_forward, Experts) for s in stacks for layer in s.layers())

    def max_positions(self) -> int | None:
        """The longest sequence a learned table allows; None when nothing limits it."""
        tables = [e.positions for e in (self.embedding, self.source) if e is not None]
        sizes = [t.max_positions for t in tables if t.kind == "learned"]
        return min(sizes) if sizes else None

    def rotaries(self) -> tuple[Rotary, ...]:
        """Every distinct rotary setting in use."""
        stacks = [s for s in (self.encoder, self.decoder) if s is not None]
        found = [layer.attention.positions for s in stacks for layer in s.layers()]
        return tuple(dict.fromkeys(p for p in found if isinstance(p, Rotary)))


def _norms(part: Frozen, path: str = "") -> Iterator[tuple[str, Norm]]:
    """Every norm of a configuration, with the dotted path to it."""
    for name in type(part).model_fields:
        value = getattr(part, name)
        items = enumerate(value) if isinstance(value, tuple) else [(None, value)]
        for index, item in items:
            where = f"{path}{name}" if index is None else f"{path}{name}.{index}"
            if isinstance(item, Norm):
                yield where, item
            elif isinstance(item, Frozen):
                yield from _norms(item, f"{where}.")
