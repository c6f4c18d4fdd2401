"""What presets are built from: parts in their usual form, and the two ways of joining stacks."""

from __future__ import annotations

from typing import Literal

from isoform.config.model import Embedding, Layer, ModelConfig, Projection, Stack, TokenHead
from isoform.config.parts import (
    ActivationName,
    AddedPositions,
    Attention,
    AttentionBias,
    AttentionPositions,
    FeedForward,
    Gated,
    NoPositions,
    Norm,
    QKNorm,
    TwoLayer,
)
from isoform.errors import ConfigError

NONE = NoPositions()
Biases = bool | tuple[bool, bool, bool, bool]


def layer_norm(eps: float, *, bias: bool = True) -> Norm:
    """LayerNorm with gain and bias (6.14)."""
    return Norm(kind="layer", eps=eps, bias=bias)


def rms_norm(eps: float, *, gain_offset: float = 0.0, gain_after_cast: bool = False) -> Norm:
    """RMSNorm (6.18)."""
    return Norm(kind="rms", eps=eps, bias=False, gain_offset=gain_offset, gain_after_cast=gain_after_cast)


def per_head(d_model: int, n_heads: int) -> int:
    """Channels of a head by the standard layout d = h·d_h (R3).

    Raises:
        ConfigError: the heads do not share the channels out.
    """
    if n_heads < 1 or d_model % n_heads:
        raise ConfigError(f"n_heads {n_heads} does not divide d_model {d_model} (R3); others need head_width")
    return d_model // n_heads


def attention(
    d_model: int,
    n_heads: int,
    *,
    n_kv_heads: int | None = None,
    head_width: int | None = None,
    bias: Biases,
    positions: AttentionPositions = NONE,
    scale: float | Literal["inverse_sqrt_head_width"] = "inverse_sqrt_head_width",
    qk_norm: QKNorm | None = None,
    softcap: float | None = None,
    window: int | None = None,
    dropout: float = 0.0,
) -> Attention:
    """Attention with the standard layout d = h·d_h (R3) unless ``head_width`` says otherwise.

    Args:
        d_model: width of the residual stream.
        n_heads: query heads.
        n_kv_heads: key/value heads; ``n_heads`` when omitted.
        head_width: channels of one head; d_model / n_heads when omitted.
        bias: for all four projections, or for query, key, value and output.
        positions: what attention knows of the positions.
        scale: multiplies the scores.
        qk_norm: normalisation of queries and keys.
        softcap: tanh cap on the scores.
        window: how many positions a query reads.
        dropout: share of attention weights dropped in training.
    """
    q, k, v, o = bias if isinstance(bias, tuple) else (bias,) * 4
    return Attention(
        n_heads=n_heads,
        n_kv_heads=n_kv_heads or n_heads,
        head_width=head_width or per_head(d_model, n_heads),
        scale=scale,
        bias=AttentionBias(query=q, key=k, value=v, output=o),
        positions=positions,
        qk_norm=qk_norm,
        softcap=softcap,
        window=window,
        dropout=dropout,
    )


def two_layer(width: int, activation: ActivationName, *, bias: bool, dropout: float = 0.0) -> TwoLayer:
    """A two-layer feed-forward network (6.3)."""
    return TwoLayer(width=width, activation=activation, bias_up=bias, bias_down=bias, dropout=dropout)


def gated(width: int, activation: ActivationName, *, bias: bool = False, dropout: float = 0.0) -> Gated:
    """A gated feed-forward network (6.9)."""
    return Gated(
        width=width, activation=activation, bias_gate=bias, bias_up=bias, bias_down=bias, dropout=dropout
    )


def embedding(
    vocab_size: int,
    width: int,
    positions: AddedPositions = NONE,
    *,
    scale: float | Literal["sqrt_d_model"] = 1.0,
    norm: Norm | None = None,
    n_token_types: int = 0,
    dropout: float = 0.0,
    vocabulary: str = "shared",
    projection: Projection | None = None,
) -> Embedding:
    """A table of the model's own width, unless there is a projection."""
    return Embedding(
        vocabulary=vocabulary,
        vocab_size=vocab_size,
        width=width,
        projection=projection,
        scale=scale,
        positions=positions,
        n_token_types=n_token_types,
        norm=norm,
        dropout=dropout,
    )


def decoder_only(
    *,
    d_model: int | None = None,
    table: Embedding,
    n_layers: int,
    layer: Layer,
    final_norm: Norm | None,
    head: TokenHead,
    visibility: Literal["causal", "prefix"] = "causal",
) -> ModelConfig:
    """A causal or prefix decoder; ``d_model`` is the table's width when omitted."""
    return ModelConfig(
        d_model=d_model or table.width,
        embedding=table,
        decoder=Stack(n_layers=n_layers, visibility=visibility, layer=layer, final_norm=final_norm),
        head=head,
    )


def encoder_decoder(
    *,
    d_model: int,
    n_encoder_layers: int,
    n_decoder_layers: int,
    placement: Literal["post", "pre"],
    norm: Norm,
    final_norm: Norm | None,
    self_attention: Attention,
    feed_forward: FeedForward,
    target: Embedding,
    source: Embedding,
    tie_source: bool,
    head: TokenHead,
    residual_dropout: float,
    final_dropout: float = 0.0,
    encoder_positions: AttentionPositions = NONE,
    decoder_positions: AttentionPositions = NONE,
) -> ModelConfig:
    """Two stacks of like layers, the decoder's with cross-attention (6.24–6.28)."""

    def layer(positions: AttentionPositions, cross: bool) -> Layer:
        return Layer(
            placement=placement,
            residual="sequential",
            norm=norm,
            attention=self_attention.replace(positions=positions),
            cross_attention=self_attention.replace(positions=NONE) if cross else None,
            feed_forward=feed_forward,
            residual_dropout=residual_dropout,
        )

    return ModelConfig(
        d_model=d_model,
        embedding=target,
        source=source,
        tie_source=tie_source,
        encoder=Stack(
            n_layers=n_encoder_layers,
            visibility="bidirectional",
            layer=layer(encoder_positions, False),
            final_norm=final_norm,
            final_dropout=final_dropout,
        ),
        decoder=Stack(
            n_layers=n_decoder_layers,
            visibility="causal",
            layer=layer(decoder_positions, True),
            final_norm=final_norm,
            final_dropout=final_dropout,
        ),
        head=head,
    )
