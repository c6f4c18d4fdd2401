"""The chapter's two configurations (R16), and the same network as `torch.nn.Transformer` builds it."""

from __future__ import annotations

from typing import Literal

from isoform.config.model import ModelConfig, TokenHead
from isoform.config.parts import ActivationName, Norm, Sinusoidal
from isoform.config.presets.build import attention, embedding, encoder_decoder, layer_norm, two_layer

SINUSOIDAL = Sinusoidal(
    layout="interleaved", spacing="half_width", offset=0, base=10_000.0, precision="float64"
)


def original(
    vocab_size: int,
    *,
    source_vocab_size: int | None = None,
    d_model: int = 512,
    n_heads: int = 8,
    ffn_width: int = 2048,
    n_encoder_layers: int = 6,
    n_decoder_layers: int = 6,
    dropout: float = 0.1,
    eps: float = 1e-5,
    shared_vocabulary: bool = True,
) -> ModelConfig:
    """The original Transformer: Post-LN, LayerNorm, ReLU, sinusoidal positions, tied tables (R16).

    ``shared_vocabulary`` False gives source and target a vocabulary and a table each.
    """
    return _chapter(
        vocab_size, source_vocab_size, d_model, n_heads, ffn_width, n_encoder_layers, n_decoder_layers,
        dropout, layer_norm(eps), shared_vocabulary, "post", "relu",
    )  # fmt: skip


def pre_ln(
    vocab_size: int,
    *,
    source_vocab_size: int | None = None,
    d_model: int = 512,
    n_heads: int = 8,
    ffn_width: int = 2048,
    n_encoder_layers: int = 6,
    n_decoder_layers: int = 6,
    dropout: float = 0.1,
    eps: float = 1e-5,
    shared_vocabulary: bool = True,
) -> ModelConfig:
    """The chapter's variant: Pre-LN, LayerNorm, exact GELU, a final LayerNorm in each stack (R16)."""
    return _chapter(
        vocab_size, source_vocab_size, d_model, n_heads, ffn_width, n_encoder_layers, n_decoder_layers,
        dropout, layer_norm(eps), shared_vocabulary, "pre", "gelu",
    )  # fmt: skip


def torch_nn(
    vocab_size: int,
    *,
    d_model: int = 512,
    n_heads: int = 8,
    ffn_width: int = 2048,
    n_encoder_layers: int = 6,
    n_decoder_layers: int = 6,
    norm_first: bool = False,
    activation: ActivationName = "relu",
    dropout: float = 0.1,
    eps: float = 1e-5,
    bias: bool = True,
) -> ModelConfig:
    """`torch.nn.Transformer`: as `original`, but with a final norm in both stacks also in Post-LN.

    ``bias`` False leaves out the biases of projections, feed-forward networks and norms alike.
    """
    norm = layer_norm(eps, bias=bias)
    table = embedding(vocab_size, d_model, SINUSOIDAL, scale="sqrt_d_model", dropout=dropout)
    return encoder_decoder(
        d_model=d_model,
        n_encoder_layers=n_encoder_layers,
        n_decoder_layers=n_decoder_layers,
        placement="pre" if norm_first else "post",
        norm=norm,
        final_norm=norm,
        self_attention=attention(d_model, n_heads, bias=bias, dropout=dropout),
        feed_forward=two_layer(ffn_width, activation, bias=bias, dropout=dropout),
        target=table,
        source=table,
        tie_source=True,
        head=TokenHead(tied=True, bias=False),
        residual_dropout=dropout,
    )


def _chapter(
    vocab_size: int,
    source_vocab_size: int | None,
    d_model: int,
    n_heads: int,
    ffn_width: int,
    n_encoder_layers: int,
    n_decoder_layers: int,
    dropout: float,
    norm: Norm,
    shared: bool,
    placement: Literal["post", "pre"],
    activation: ActivationName,
) -> ModelConfig:
    target = embedding(
        vocab_size, d_model, SINUSOIDAL, scale="sqrt_d_model", dropout=dropout,
        vocabulary="shared" if shared else "target",
    )  # fmt: skip
    source = target.replace(
        vocabulary="shared" if shared else "source", vocab_size=source_vocab_size or vocab_size
    )
    return encoder_decoder(
        d_model=d_model,
        n_encoder_layers=n_encoder_layers,
        n_decoder_layers=n_decoder_layers,
        placement=placement,
        norm=norm,
        final_norm=norm if placement == "pre" else None,
        self_attention=attention(d_model, n_heads, bias=True, dropout=dropout),
        feed_forward=two_layer(ffn_width, activation, bias=True, dropout=dropout),
        target=target,
        source=source,
        tie_source=shared,
        head=TokenHead(tied=True, bias=False),
        residual_dropout=dropout,
    )
