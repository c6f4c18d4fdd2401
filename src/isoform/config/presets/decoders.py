"""Decoder families with LayerNorm. Defaults are those of the released model that each docstring names."""

from __future__ import annotations

from typing import Literal

from isoform.config.model import Layer, ModelConfig, Projection, TokenHead, Transform
from isoform.config.parts import ActivationName, Alibi, Learned, QKNorm, Rotary
from isoform.config.presets.build import (
    NONE,
    attention,
    decoder_only,
    embedding,
    layer_norm,
    per_head,
    two_layer,
)


def gpt2(
    vocab_size: int = 50_257,
    *,
    d_model: int = 768,
    n_heads: int = 12,
    ffn_width: int = 3072,
    n_layers: int = 12,
    max_positions: int = 1024,
    dropout: float = 0.1,
    eps: float = 1e-5,
    visibility: Literal["causal", "prefix"] = "causal",
) -> ModelConfig:
    """GPT-2 small (Radford et al. 2019): Pre-LN, tanh GELU, learned positions, tied head."""
    norm = layer_norm(eps)
    return decoder_only(
        table=embedding(vocab_size, d_model, Learned(max_positions=max_positions, offset=0), dropout=dropout),
        n_layers=n_layers,
        layer=Layer(
            placement="pre",
            residual="sequential",
            norm=norm,
            attention=attention(d_model, n_heads, bias=True, dropout=dropout),
            feed_forward=two_layer(ffn_width, "gelu_tanh", bias=True),
            residual_dropout=dropout,
        ),
        final_norm=norm,
        head=TokenHead(tied=True, bias=False),
        visibility=visibility,
    )


def gpt_neox(
    vocab_size: int = 50_304,
    *,
    d_model: int = 512,
    n_heads: int = 8,
    ffn_width: int = 2048,
    n_layers: int = 6,
    rotary_share: float = 0.25,
    theta: float = 10_000.0,
    parallel: bool = True,
    activation: ActivationName = "gelu",
    eps: float = 1e-5,
) -> ModelConfig:
    """Pythia 70M (Biderman et al. 2023; GPT-NeoX, Black et al. 2022): parallel residual, partial rotary.

    GPT-NeoX 20B has ``activation="gelu_tanh"``.
    """
    norm = layer_norm(eps)
    rotary = Rotary(
        layout="half", theta=theta, width=int(per_head(d_model, n_heads) * rotary_share), precision="float32"
    )
    return decoder_only(
        table=embedding(vocab_size, d_model),
        n_layers=n_layers,
        layer=Layer(
            placement="pre",
            residual="parallel" if parallel else "sequential",
            norm=norm,
            attention=attention(d_model, n_heads, bias=True, positions=rotary),
            feed_forward=two_layer(ffn_width, activation, bias=True),
        ),
        final_norm=norm,
        head=TokenHead(tied=False, bias=False),
    )


def opt(
    vocab_size: int = 50_272,
    *,
    d_model: int = 768,
    embedding_width: int | None = None,
    n_heads: int = 12,
    ffn_width: int = 3072,
    n_layers: int = 12,
    max_positions: int = 2048,
    placement: Literal["pre", "post"] = "pre",
    dropout: float = 0.1,
) -> ModelConfig:
    """OPT 125M (Zhang et al. 2022): Pre-LN, ReLU, learned positions that start at 2.

    OPT 350M is ``d_model=1024, embedding_width=512, n_heads=16, ffn_width=4096, n_layers=24,
    placement="post"``: a narrow table with a projection on either side, and no final norm.
    """
    norm = layer_norm(1e-5)
    positions = Learned(max_positions=max_positions, offset=2)
    narrow = embedding_width is not None and embedding_width != d_model
    return decoder_only(
        d_model=d_model,
        table=embedding(
            vocab_size, embedding_width or d_model, positions,
            projection=Projection(place="before_positions", bias=False) if narrow else None,
        ),
        n_layers=n_layers,
        layer=Layer(
            placement=placement,
            residual="sequential",
            norm=norm,
            attention=attention(d_model, n_heads, bias=True),
            feed_forward=two_layer(ffn_width, "relu", bias=True),
            residual_dropout=dropout,
        ),
        final_norm=norm if placement == "pre" else None,
        head=TokenHead(
            tied=True,
            bias=False,
            transform=Transform(activation="identity", bias=False, norm=None) if narrow else None,
        ),
    )  # fmt: skip


def bloom(
    vocab_size: int = 250_880,
    *,
    d_model: int = 1024,
    n_heads: int = 16,
    n_layers: int = 24,
    eps: float = 1e-5,
    residual_source: Literal["input", "normalised"] = "input",
) -> ModelConfig:
    """BLOOM 560M (Le Scao et al. 2022): ALiBi, embedding norm, tanh GELU, tied head."""
    norm = layer_norm(eps)
    return decoder_only(
        table=embedding(vocab_size, d_model, norm=norm),
        n_layers=n_layers,
        layer=Layer(
            placement="pre",
            residual="sequential",
            residual_source=residual_source,
            norm=norm,
            attention=attention(d_model, n_heads, bias=True, positions=Alibi()),
            feed_forward=two_layer(4 * d_model, "gelu_tanh", bias=True),
        ),
        final_norm=norm,
        head=TokenHead(tied=True, bias=False),
    )


def falcon(
    vocab_size: int = 65_024,
    *,
    d_model: int = 4544,
    n_heads: int = 71,
    n_kv_heads: int = 1,
    ffn_width: int | None = None,
    n_layers: int = 32,
    residual: Literal["sequential", "parallel", "parallel_shared_norm"] = "parallel_shared_norm",
    alibi: bool = False,
    bias: bool = False,
    theta: float = 10_000.0,
) -> ModelConfig:
    """Falcon 7B (Almazrouei et al. 2023): one norm for parallel sublayers, one key/value head, no biases.

    Falcon 40B has ``residual="parallel"`` and 8 key/value heads; Falcon-RW is sequential, with ALiBi and
    biases.
    """
    norm = layer_norm(1e-5)
    width = per_head(d_model, n_heads)
    rotary = Rotary(layout="half", theta=theta, width=width, precision="float32")
    return decoder_only(
        table=embedding(vocab_size, d_model),
        n_layers=n_layers,
        layer=Layer(
            placement="pre",
            residual=residual,
            norm=norm,
            attention=attention(
                d_model, n_heads, n_kv_heads=n_kv_heads, bias=bias,
                positions=Alibi(factor=width**-0.5, rounding="bfloat16") if alibi else rotary,
            ),
            feed_forward=two_layer(ffn_width or 4 * d_model, "gelu", bias=bias),
        ),
        final_norm=norm,
        head=TokenHead(tied=True, bias=False),
    )  # fmt: skip


def phi(
    vocab_size: int = 51_200,
    *,
    d_model: int = 2048,
    n_heads: int = 32,
    ffn_width: int = 8192,
    n_layers: int = 24,
    rotary_share: float = 0.5,
    qk_norm: bool = False,
    residual_dropout: float = 0.0,
    eps: float = 1e-5,
) -> ModelConfig:
    """Phi 1.5 (Li et al. 2023): one norm for parallel sublayers, partial rotary, a head with a bias.

    Phi 2 is ``d_model=2560, ffn_width=10_240, n_layers=32, rotary_share=0.4, residual_dropout=0.1``.
    """
    norm = layer_norm(eps)
    rotary = Rotary(
        layout="half",
        theta=10_000.0,
        width=int(per_head(d_model, n_heads) * rotary_share),
        precision="float32",
    )
    return decoder_only(
        table=embedding(vocab_size, d_model),
        n_layers=n_layers,
        layer=Layer(
            placement="pre",
            residual="parallel_shared_norm",
            norm=norm,
            attention=attention(
                d_model, n_heads, bias=True, positions=rotary,
                qk_norm=QKNorm(norm=norm, axis="head", order="before_rotation") if qk_norm else None,
            ),
            feed_forward=two_layer(ffn_width, "gelu_tanh", bias=True),
            residual_dropout=residual_dropout,
        ),
        final_norm=norm,
        head=TokenHead(tied=False, bias=True),
    )  # fmt: skip


def starcoder2(
    vocab_size: int = 49_152,
    *,
    d_model: int = 3072,
    n_heads: int = 24,
    n_kv_heads: int = 2,
    ffn_width: int = 12_288,
    n_layers: int = 30,
    theta: float = 999_999.4420358813,
    window: int | None = 4096,
    dropout: float = 0.1,
    eps: float = 1e-5,
) -> ModelConfig:
    """StarCoder2 3B (Lozhkov et al. 2024): rotary, grouped queries, a window, LayerNorm and biases."""
    norm = layer_norm(eps)
    rotary = Rotary(layout="half", theta=theta, width=per_head(d_model, n_heads), precision="float32")
    return decoder_only(
        table=embedding(vocab_size, d_model, NONE, dropout=dropout),
        n_layers=n_layers,
        layer=Layer(
            placement="pre",
            residual="sequential",
            norm=norm,
            attention=attention(
                d_model, n_heads, n_kv_heads=n_kv_heads, bias=True, positions=rotary, window=window,
                dropout=dropout,
            ),
            feed_forward=two_layer(ffn_width, "gelu_tanh", bias=True),
            residual_dropout=dropout,
        ),
        final_norm=norm,
        head=TokenHead(tied=True, bias=False),
    )  # fmt: skip
