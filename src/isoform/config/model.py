"""The architecture of a whole network as one frozen value."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from isoform.config.base import Frozen, Nullable
from isoform.config.parts import (
    ActivationName,
    AddedPositions,
    Attention,
    Dropout,
    Experts,
    FeedForward,
    NoPositions,
    Norm,
    RelativeBuckets,
    Rotary,
)


class Layer(Frozen):
    """One layer: sublayers, and how they join the residual stream (6.20–6.31).

    ``placement``: "post" N(x + F(x)); "pre" x + F(N(x)); "sandwich" x + N(F(N(x))); "res_post" x + N(F(x)).
    ``residual``: "sequential"; "parallel" x + A(N1 x) + F(N2 x); "parallel_shared_norm" x + A(N x) + F(N x).
    ``residual_source``: "input" adds to the stream itself, "normalised" to N(x) (pre placement only).
    ``residual_scale`` multiplies every increment (R11). ``memory_norm`` normalises the memory again before
    cross-attention; absent in (6.30).
    """

    placement: Literal["post", "pre", "sandwich", "res_post"]
    residual: Literal["sequential", "parallel", "parallel_shared_norm"]
    residual_source: Literal["input", "normalised"] = "input"
    residual_scale: PositiveFloat = 1.0
    norm: Norm
    attention: Attention
    cross_attention: Attention | None = None
    memory_norm: Norm | None = None
    feed_forward: FeedForward
    residual_dropout: Dropout = 0.0

    @model_validator(mode="after")
    def _consistent(self) -> Layer:
        if self.residual != "sequential" and self.placement != "pre":
            raise ValueError(
                f"residual {self.residual!r} is defined for placement 'pre', not {self.placement!r}"
            )
        if self.residual != "sequential" and self.cross_attention is not None:
            raise ValueError(f"residual {self.residual!r} has no place for cross_attention")
        if self.residual_source == "normalised" and (
            self.placement != "pre" or self.residual != "sequential"
        ):
            raise ValueError("residual_source 'normalised' needs placement 'pre' and residual 'sequential'")
        if self.memory_norm is not None and self.cross_attention is None:
            raise ValueError("memory_norm is set but there is no cross_attention")
        if self.cross_attention is not None:
            if not isinstance(self.cross_attention.positions, NoPositions):
                raise ValueError(
                    "cross_attention.positions must be 'none': source and target count separately"
                )
            if self.cross_attention.window is not None:
                raise ValueError("cross_attention.window must be unset: it has no triangle to cut (R21)")
        return self


class Variant(Frozen):
    """Layers that differ from `Stack.layer`: those listed use these parts instead."""

    layers: tuple[int, ...]
    attention: Attention | None = None
    feed_forward: FeedForward | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Variant:
        if self.attention is None and self.feed_forward is None:
            raise ValueError("a variant must set attention or feed_forward")
        return self


class Stack(Frozen):
    """``n_layers`` layers under one visibility, and the norm at the end.

    ``final_norm`` must be written, also when it is null (R15). ``layer_sharing[i]`` names the layer whose
    parameters layer i uses; null: every layer has its own (R20).
    """

    n_layers: PositiveInt
    visibility: Literal["bidirectional", "causal", "prefix"]
    layer: Layer
    variants: tuple[Variant, ...] = ()
    final_norm: Nullable[Norm]
    layer_sharing: tuple[int, ...] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Stack:
        seen: set[tuple[int, str]] = set()
        for variant in self.variants:
            for index in variant.layers:
                if not 0 <= index < self.n_layers:
                    raise ValueError(
                        f"variants name layer {index}, the stack has layers 0 to {self.n_layers - 1}"
                    )
                for part in ("attention", "feed_forward"):
                    if getattr(variant, part) is not None:
                        if (index, part) in seen:
                            raise ValueError(f"two variants set {part} of layer {index}")
                        seen.add((index, part))
        if self.layer_sharing is not None:
            if len(self.layer_sharing) != self.n_layers:
                raise ValueError(
                    f"layer_sharing has {len(self.layer_sharing)} entries for {self.n_layers} layers"
                )
            for i, j in enumerate(self.layer_sharing):
                if not (0 <= j <= i and self.layer_sharing[j] == j):
                    raise ValueError(
                        f"layer_sharing[{i}] = {j}: must name an earlier layer that has its own parameters"
                    )
        tables = {
            layer.attention.positions
            for layer in self.layers()
            if isinstance(layer.attention.positions, RelativeBuckets)
        }
        heads = {
            l.attention.n_heads for l in self.layers() if isinstance(l.attention.positions, RelativeBuckets)
        }
        if len(tables) > 1 or len(heads) > 1:
            raise ValueError(
                "relative_buckets: one table serves the whole stack, so its settings and heads must agree"
            )
        return self

    def layer_at(self, index: int) -> Layer:
        """The configuration of one layer, variants applied."""
        parts = {
            part: value
            for variant in self.variants
            if index in variant.layers
            for part in ("attention", "feed_forward")
            if (value := getattr(variant, part)) is not None
        }
        return self.layer.model_copy(update=parts) if parts else self.layer

    def layers(self) -> tuple[Layer, ...]:
        """All layers, first to last."""
        return tuple(self.layer_at(i) for i in range(self.n_layers))

    def owner(self, index: int) -> int:
        """The layer whose parameters layer ``index`` uses."""
        return index if self.layer_sharing is None else self.layer_sharing[index]


class Projection(Frozen):
    """From the table's width to d_model, before the positions are added or after the embedding norm."""

    place: Literal["before_positions", "after_norm"]
    bias: bool


class Embedding(Frozen):
    """From token ids to the first hidden state.

    ``vocabulary`` names the token ids the rows stand for: two tables may be shared only when they name the
    same one, which is more than having the same size (R27). ``width`` is the table's; where it differs from
    d_model a ``projection`` says where it is brought there. Order: lookup × scale → [projection] + positions
    + token types → norm → [projection] → dropout.
    """

    vocabulary: str
    vocab_size: PositiveInt
    width: PositiveInt
    projection: Projection | None = None
    scale: PositiveFloat | Literal["sqrt_d_model"] = 1.0
    positions: AddedPositions
    n_token_types: int = Field(default=0, ge=0)
    norm: Norm | None = None
    dropout: Dropout = 0.0


class Transform(Frozen):
    """A layer in front of the output matrix: norm(activation(x W + b)), to the table's width."""

    activation: ActivationName
    bias: bool
    norm: Nullable[Norm]


class TokenHead(Frozen):
    """Scores over the vocabulary: (transform(h) · scale) Eᵀ + b, then c·tanh(z/c) with ``softcap`` c.

    ``tied`` shares E with the embedding of the same stream (6.36).
    """

    kind: Literal["tokens"] = "tokens"
    tied: bool
    bias: bool
    transform: Transform | None = None
    scale: PositiveFloat | Literal["inverse_sqrt_d_model"] = 1.0
    softcap: PositiveFloat | None = None


class Pooler(Frozen):
    """A dense layer d_model → d_model with an activation."""

    activation: ActivationName
    bias: bool


class SequenceHead(Frozen):
    """One decision a sequence: pool, an optional dense layer, dropout, scores over the labels."""

    kind: Literal["sequence_labels"] = "sequence_labels"
    n_labels: PositiveInt
    pooling: Literal["mean", "first", "last"]
    pooler: Nullable[Pooler]
    bias: bool
    dropout: Dropout = 0.0


class TaggingHead(Frozen):
    """One decision a token: an optional dense layer, dropout, scores over the labels."""

    kind: Literal["token_labels"] = "token_labels"
    n_labels: PositiveInt
    dense: Pooler | None = None
    bias: bool
    dropout: Dropout = 0.0


class PoolingHead(Frozen):
    """One vector a sequence; ``normalise`` divides by its Euclidean norm."""

    kind: Literal["pooled"] = "pooled"
    pooling: Literal["mean", "first", "last"]
    pooler: Nullable[Pooler]
    normalise: bool


Head = Annotated[TokenHead | SequenceHead | TaggingHead | PoolingHead, Field(discriminator="kind")]


class ModelConfig(Frozen):
    """A whole network.

    Encoder only: ``encoder`` set. Decoder only (causal or prefix): ``decoder`` set, its layers without
    cross-attention. Encoder–decoder: both set, decoder layers with cross-attention, ``source`` set.
    ``embedding`` belongs to the only stream, or to the target. ``tie_source`` shares the source table with
    the target's (R27); positions, norms and scales stay each stream's own.
    """

    format: Literal[1] = 1
    d_model: PositiveInt
    embedding: Embedding
    source: Embedding | None = None
    tie_source: bool = False
    encoder: Stack | None = None
    decoder: Stack | None = None
    head: Nullable[Head]

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
            if table is not None and (table.width != self.d_model) != (table.projection is not None):
                raise ValueError(
                    f"{name}.width {table.width} and d_model {self.d_model}: a projection is needed exactly when they differ"
                )
        self._check_source()
        self._check_head(both)
        return self

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
                    f"a tied head needs a transform from d_model {self.d_model} to embedding.width {self.embedding.width}"
                )
            if both and self.decoder is None:
                raise ValueError("a token head needs a decoder")
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
        found = [l.attention.positions for s in stacks for l in s.layers()]
        return tuple(dict.fromkeys(p for p in found if isinstance(p, Rotary)))
