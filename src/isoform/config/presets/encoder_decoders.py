"""Encoder–decoder families. Defaults are those of the released model that each docstring names."""

from __future__ import annotations

from typing import Literal

from isoform.config.model import ModelConfig, TokenHead
from isoform.config.parts import (
    ActivationName,
    AddedPositions,
    FeedForward,
    Learned,
    Norm,
    RelativeBuckets,
    Sinusoidal,
)
from isoform.config.presets.build import (
    attention,
    embedding,
    encoder_decoder,
    gated,
    layer_norm,
    rms_norm,
    two_layer,
)

CONCATENATED = Sinusoidal(
    layout="concatenated", spacing="half_width", offset=0, base=10_000.0, precision="float64_to_float32"
)


def t5(
    vocab_size: int = 32_128,
    *,
    d_model: int = 512,
    n_heads: int = 8,
    head_width: int = 64,
    ffn_width: int = 2048,
    n_layers: int = 6,
    gated_activation: ActivationName | None = None,
    tied: bool = True,
    dropout: float = 0.1,
) -> ModelConfig:
    """T5 small (Raffel et al. 2020): Pre-RMSNorm, unscaled scores, relative buckets, scaled tied head.

    ``gated_activation="gelu_tanh"`` with ``tied=False`` is version 1.1.
    """
    feed_forward: FeedForward = (
        gated(ffn_width, gated_activation, dropout=dropout)
        if gated_activation
        else two_layer(ffn_width, "relu", bias=False, dropout=dropout)
    )
    norm = rms_norm(1e-6)
    table = embedding(vocab_size, d_model, dropout=dropout)

    def buckets(bidirectional: bool) -> RelativeBuckets:
        return RelativeBuckets(n_buckets=32, max_distance=128, bidirectional=bidirectional)

    return encoder_decoder(
        d_model=d_model,
        n_encoder_layers=n_layers,
        n_decoder_layers=n_layers,
        placement="pre",
        norm=norm,
        final_norm=norm,
        self_attention=attention(
            d_model, n_heads, head_width=head_width, bias=False, scale=1.0, dropout=dropout
        ),
        feed_forward=feed_forward,
        target=table,
        source=table,
        tie_source=True,
        head=TokenHead(tied=tied, bias=False, scale="inverse_sqrt_d_model" if tied else 1.0),
        residual_dropout=dropout,
        final_dropout=dropout,
        encoder_positions=buckets(True),
        decoder_positions=buckets(False),
    )


def bart(
    vocab_size: int = 50_265,
    *,
    d_model: int = 768,
    n_heads: int = 12,
    ffn_width: int = 3072,
    n_layers: int = 6,
    max_positions: int = 1024,
    activation: ActivationName = "gelu",
    scale_embedding: bool = False,
    placement: Literal["post", "pre"] = "post",
    dropout: float = 0.1,
    attention_dropout: float = 0.1,
    activation_dropout: float = 0.1,
) -> ModelConfig:
    """BART base (Lewis et al. 2020): Post-LN, exact GELU, learned positions, embedding norm, head bias."""
    return _fairseq(
        vocab_size, d_model, n_heads, ffn_width, n_layers, Learned(max_positions=max_positions, offset=2),
        placement=placement, activation=activation, scale_embedding=scale_embedding,
        embedding_norm=layer_norm(1e-5), head_bias=True, dropout=dropout,
        attention_dropout=attention_dropout, activation_dropout=activation_dropout,
    )  # fmt: skip


def mbart(
    vocab_size: int = 250_027,
    *,
    d_model: int = 1024,
    n_heads: int = 16,
    ffn_width: int = 4096,
    n_layers: int = 12,
    max_positions: int = 1024,
    activation: ActivationName = "gelu",
    dropout: float = 0.1,
) -> ModelConfig:
    """mBART large cc25 (Liu et al. 2020): BART in Pre-LN with final norms and scaled embeddings."""
    return _fairseq(
        vocab_size, d_model, n_heads, ffn_width, n_layers, Learned(max_positions=max_positions, offset=2),
        placement="pre", activation=activation, scale_embedding=True, embedding_norm=layer_norm(1e-5),
        head_bias=True, dropout=dropout,
    )  # fmt: skip


def pegasus(
    vocab_size: int = 96_103,
    *,
    d_model: int = 1024,
    n_heads: int = 16,
    ffn_width: int = 4096,
    n_layers: int = 16,
    activation: ActivationName = "relu",
    dropout: float = 0.1,
    attention_dropout: float = 0.1,
    activation_dropout: float = 0.1,
) -> ModelConfig:
    """Pegasus large (Zhang et al. 2020): Pre-LN, ReLU, concatenated sinusoids, scaled tables, head bias."""
    return _fairseq(
        vocab_size, d_model, n_heads, ffn_width, n_layers, CONCATENATED, placement="pre",
        activation=activation, scale_embedding=True, embedding_norm=None, head_bias=True, dropout=dropout,
        attention_dropout=attention_dropout, activation_dropout=activation_dropout,
    )  # fmt: skip


def m2m100(
    vocab_size: int = 128_112,
    *,
    d_model: int = 1024,
    n_heads: int = 16,
    ffn_width: int = 4096,
    n_layers: int = 12,
    activation: ActivationName = "relu",
    dropout: float = 0.1,
    attention_dropout: float = 0.1,
) -> ModelConfig:
    """M2M100 418M (Fan et al. 2021; NLLB): Pre-LN, ReLU, fairseq's sinusoids from 2, scaled tables."""
    positions = Sinusoidal(
        layout="concatenated", spacing="half_width_minus_one", offset=2, base=10_000.0, precision="float32"
    )
    return _fairseq(
        vocab_size, d_model, n_heads, ffn_width, n_layers, positions, placement="pre", activation=activation,
        scale_embedding=True, embedding_norm=None, head_bias=False, dropout=dropout,
        attention_dropout=attention_dropout,
    )  # fmt: skip


def marian(
    vocab_size: int = 58_101,
    *,
    d_model: int = 512,
    n_heads: int = 8,
    ffn_width: int = 2048,
    n_layers: int = 6,
    activation: ActivationName = "silu",
    dropout: float = 0.1,
) -> ModelConfig:
    """OPUS-MT (Tiedemann & Thottingal 2020; Marian): Post-LN, SiLU, concatenated sinusoids, scaled tables."""
    return _fairseq(
        vocab_size, d_model, n_heads, ffn_width, n_layers, CONCATENATED, placement="post",
        activation=activation, scale_embedding=True, embedding_norm=None, head_bias=True, dropout=dropout,
    )  # fmt: skip


def _fairseq(
    vocab_size: int,
    d_model: int,
    n_heads: int,
    ffn_width: int,
    n_layers: int,
    positions: AddedPositions,
    *,
    placement: Literal["post", "pre"],
    activation: ActivationName,
    scale_embedding: bool,
    embedding_norm: Norm | None,
    head_bias: bool,
    dropout: float,
    attention_dropout: float = 0.0,
    activation_dropout: float = 0.0,
) -> ModelConfig:
    """BART and its relatives: LayerNorm, all biases, one table for source, target and head."""
    norm = layer_norm(1e-5)
    table = embedding(
        vocab_size, d_model, positions, norm=embedding_norm, dropout=dropout,
        scale="sqrt_d_model" if scale_embedding else 1.0,
    )  # fmt: skip
    return encoder_decoder(
        d_model=d_model,
        n_encoder_layers=n_layers,
        n_decoder_layers=n_layers,
        placement=placement,
        norm=norm,
        final_norm=norm if placement == "pre" else None,
        self_attention=attention(d_model, n_heads, bias=True, dropout=attention_dropout),
        feed_forward=two_layer(ffn_width, activation, bias=True, dropout=activation_dropout),
        target=table,
        source=table,
        tie_source=True,
        head=TokenHead(tied=True, bias=head_bias),
        residual_dropout=dropout,
    )
