"""A layer, and a stack of them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from isoform.config.base import Count, Dropout, Frozen, Index, Nullable, Positive
from isoform.config.parts import Attention, FeedForward, Norm
from isoform.config.positions import Alibi, NoPositions, RelativeBuckets


class Layer(Frozen):
    """One layer: sublayers, and how they join the residual stream (6.20–6.31, R19)."""

    placement: Literal["post", "pre", "sandwich", "res_post"]
    """Where the norm N stands around a sublayer F: post N(x + F(x)); pre x + F(N(x)); sandwich
    x + N(F(N(x))); res_post x + N(F(x)) (R15)."""
    residual: Literal["sequential", "parallel", "parallel_shared_norm"]
    """One sublayer after the other (sequential); x + A(N1 x) + F(N2 x) (parallel); or x + A(N x) + F(N x)
    (parallel_shared_norm)."""
    residual_source: Literal["input", "normalised"] = "input"
    """What an increment is added to: the stream itself, or N(x) (BLOOM's variant; pre placement only)."""
    residual_scale: Positive = 1.0
    """Multiplies every increment, forward and backward (R11)."""
    norm: Norm
    """The norm of every sublayer; each has its own parameters."""
    attention: Attention
    """Self-attention."""
    cross_attention: Attention | None = None
    """Attention to the encoder's memory, between self-attention and feed-forward."""
    memory_norm: Norm | None = None
    """A norm on the memory in front of every cross-attention; absent in (6.30)."""
    feed_forward: FeedForward
    """The feed-forward network."""
    residual_dropout: Dropout = 0.0
    """Share of each increment dropped in training, before it is scaled and added."""
    residual_dropout_on: Literal["all", "attention", "feed_forward"] = "all"
    """Which increments residual_dropout acts on: all, only those of attention (ALBERT), or only the
    feed-forward's (DistilBERT)."""

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

    def increment_dropout(self, sublayer: Literal["attention", "feed_forward"]) -> float:
        """The dropout on the increment of a sublayer; cross-attention counts as attention."""
        return self.residual_dropout if self.residual_dropout_on in ("all", sublayer) else 0.0


class Variant(Frozen):
    """Layers that differ from the stack's ``layer``: those listed use these parts instead."""

    layers: Annotated[tuple[Index, ...], Field(min_length=1)]
    """Numbers of the layers, counted from 0."""
    attention: Attention | None = None
    """Their self-attention."""
    feed_forward: FeedForward | None = None
    """Their feed-forward network."""

    @model_validator(mode="after")
    def _says_something(self) -> Variant:
        if self.attention is None and self.feed_forward is None:
            raise ValueError("a variant must set attention or feed_forward")
        return self


class Stack(Frozen):
    """``n_layers`` layers under one visibility, and the norm at the end."""

    n_layers: Count
    """How many layers there are."""
    visibility: Literal["bidirectional", "causal", "prefix"]
    """Who may read whom (6.32–6.33)."""
    layer: Layer
    """Every layer, unless a variant says otherwise."""
    variants: tuple[Variant, ...] = ()
    """Layers with other parts (Gemma 2's alternating windows)."""
    final_norm: Nullable[Norm]
    """The norm after the last layer; must be written, also when there is none (R15)."""
    final_dropout: Dropout = 0.0
    """Share of the last states dropped in training, after the final norm (T5)."""
    layer_sharing: tuple[Index, ...] | None = None
    """Entry i names the layer whose parameters layer i uses (ALBERT); unset: each has its own (R20)."""

    @model_validator(mode="after")
    def _consistent(self) -> Stack:
        self._check_variants()
        self._check_sharing()
        attentions = [layer.attention for layer in self.layers()]
        rounded = [a for a in attentions if isinstance(a.positions, Alibi) and a.positions.rounding != "none"]
        if rounded and self.visibility != "causal":
            raise ValueError("rounded alibi counts from the row's start, which needs visibility 'causal'")
        bucketed = [a for a in attentions if isinstance(a.positions, RelativeBuckets)]
        if len({(attention.positions, attention.n_heads) for attention in bucketed}) > 1:
            raise ValueError(
                "relative_buckets: one table serves the whole stack, so its settings and heads must agree"
            )
        return self

    def _check_variants(self) -> None:
        seen: set[tuple[int, str]] = set()
        for variant in self.variants:
            for index in variant.layers:
                if index >= self.n_layers:
                    raise ValueError(
                        f"variants name layer {index}, the stack has layers 0 to {self.n_layers - 1}"
                    )
                for part in ("attention", "feed_forward"):
                    if getattr(variant, part) is not None:
                        if (index, part) in seen:
                            raise ValueError(f"two variants set {part} of layer {index}")
                        seen.add((index, part))

    def _check_sharing(self) -> None:
        if self.layer_sharing is None:
            return
        if len(self.layer_sharing) != self.n_layers:
            raise ValueError(
                f"layer_sharing has {len(self.layer_sharing)} entries for {self.n_layers} layers"
            )
        for i, j in enumerate(self.layer_sharing):
            if j > i or self.layer_sharing[j] != j:
                raise ValueError(
                    f"layer_sharing[{i}] = {j}: must name a layer up to it that has its own parameters"
                )
            if self.layer_at(i) != self.layer_at(j):
                raise ValueError(f"layer_sharing: layer {i} is configured otherwise than layer {j}")

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
