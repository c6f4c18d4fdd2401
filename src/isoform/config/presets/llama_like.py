"""Llama and its relatives. Defaults are those of the released model that each docstring names."""

from __future__ import annotations

from isoform.config.model import Layer, ModelConfig, TokenHead
from isoform.config.parts import (
    Experts,
    FeedForward,
    Llama3Scaling,
    NoScaling,
    QKNorm,
    Rotary,
    RotaryScaling,
)
from isoform.config.presets.build import (
    Biases,
    attention,
    decoder_only,
    embedding,
    gated,
    per_head,
    rms_norm,
)

LLAMA_3_1 = Llama3Scaling(
    factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=8192
)


def llama(
    vocab_size: int = 32_000,
    *,
    d_model: int = 4096,
    n_heads: int = 32,
    n_kv_heads: int | None = None,
    head_width: int | None = None,
    ffn_width: int = 11_008,
    n_layers: int = 32,
    theta: float = 10_000.0,
    scaling: RotaryScaling | None = None,
    eps: float = 1e-6,
    tied: bool = False,
    bias: Biases = False,
    qk_norm: QKNorm | None = None,
    window: int | None = None,
    feed_forward: FeedForward | None = None,
) -> ModelConfig:
    """Llama 7B (Touvron et al. 2023): Pre-RMSNorm, SwiGLU, rotary in the half layout, no biases.

    Llama 2 has ``eps=1e-5``. ``feed_forward`` replaces the gated network of ``ffn_width``.
    """
    norm = rms_norm(eps)
    width = head_width or per_head(d_model, n_heads)
    rotary = Rotary(
        layout="half", theta=theta, width=width, scaling=scaling or NoScaling(), precision="float32"
    )
    return decoder_only(
        table=embedding(vocab_size, d_model),
        n_layers=n_layers,
        layer=Layer(
            placement="pre",
            residual="sequential",
            norm=norm,
            attention=attention(
                d_model, n_heads, n_kv_heads=n_kv_heads, head_width=width, bias=bias, positions=rotary,
                qk_norm=qk_norm, window=window,
            ),
            feed_forward=feed_forward or gated(ffn_width, "silu"),
        ),
        final_norm=norm,
        head=TokenHead(tied=tied, bias=False),
    )  # fmt: skip


def llama3(
    vocab_size: int = 128_256,
    *,
    d_model: int = 4096,
    n_heads: int = 32,
    n_kv_heads: int = 8,
    ffn_width: int = 14_336,
    n_layers: int = 32,
    scaling: RotaryScaling | None = LLAMA_3_1,
    tied: bool = False,
) -> ModelConfig:
    """Llama 3.1 8B (2024): Llama, grouped queries, scaled frequencies; Llama 3 has ``scaling=None``."""
    return llama(
        vocab_size, d_model=d_model, n_heads=n_heads, n_kv_heads=n_kv_heads, ffn_width=ffn_width,
        n_layers=n_layers, theta=500_000.0, scaling=scaling, eps=1e-5, tied=tied,
    )  # fmt: skip


def mistral(
    vocab_size: int = 32_000,
    *,
    d_model: int = 4096,
    n_heads: int = 32,
    n_kv_heads: int = 8,
    ffn_width: int = 14_336,
    n_layers: int = 32,
    window: int | None = 4096,
) -> ModelConfig:
    """Mistral 7B v0.1 (Jiang et al. 2023): Llama with grouped queries and a sliding window."""
    return llama(
        vocab_size, d_model=d_model, n_heads=n_heads, n_kv_heads=n_kv_heads, ffn_width=ffn_width,
        n_layers=n_layers, eps=1e-5, window=window,
    )  # fmt: skip


def mixtral(
    vocab_size: int = 32_000,
    *,
    d_model: int = 4096,
    n_heads: int = 32,
    n_kv_heads: int = 8,
    ffn_width: int = 14_336,
    n_layers: int = 32,
    n_experts: int = 8,
    top_k: int = 2,
) -> ModelConfig:
    """Mixtral 8x7B (Jiang et al. 2024): Mistral without a window, each token read by two of eight experts."""
    return llama(
        vocab_size, d_model=d_model, n_heads=n_heads, n_kv_heads=n_kv_heads, n_layers=n_layers,
        theta=1_000_000.0, eps=1e-5,
        feed_forward=Experts(
            n_experts=n_experts, top_k=top_k, expert=gated(ffn_width, "silu"), router_bias=False,
            router_order="softmax_then_top_k_renormalised", load_balance=0.02,
        ),
    )  # fmt: skip


def qwen2(
    vocab_size: int = 151_936,
    *,
    d_model: int = 896,
    n_heads: int = 14,
    n_kv_heads: int = 2,
    ffn_width: int = 4864,
    n_layers: int = 24,
    tied: bool = True,
) -> ModelConfig:
    """Qwen 2 0.5B (2024): Llama with biases on query, key and value."""
    return llama(
        vocab_size, d_model=d_model, n_heads=n_heads, n_kv_heads=n_kv_heads, ffn_width=ffn_width,
        n_layers=n_layers, theta=1_000_000.0, tied=tied, bias=(True, True, True, False),
    )  # fmt: skip


def qwen3(
    vocab_size: int = 151_936,
    *,
    d_model: int = 1024,
    n_heads: int = 16,
    n_kv_heads: int = 8,
    head_width: int = 128,
    ffn_width: int = 3072,
    n_layers: int = 28,
    tied: bool = True,
    feed_forward: FeedForward | None = None,
) -> ModelConfig:
    """Qwen 3 0.6B (2025): Llama with its own head width and RMSNorm on every query and key head."""
    return llama(
        vocab_size, d_model=d_model, n_heads=n_heads, n_kv_heads=n_kv_heads, head_width=head_width,
        ffn_width=ffn_width, n_layers=n_layers, theta=1_000_000.0, tied=tied, feed_forward=feed_forward,
        qk_norm=QKNorm(norm=rms_norm(1e-6), axis="head", order="before_rotation"),
    )  # fmt: skip


def qwen3_moe(
    vocab_size: int = 151_936,
    *,
    d_model: int = 2048,
    n_heads: int = 32,
    n_kv_heads: int = 4,
    head_width: int = 128,
    expert_width: int = 768,
    n_layers: int = 48,
    n_experts: int = 128,
    top_k: int = 8,
    renormalised: bool = True,
) -> ModelConfig:
    """Qwen 3 30B-A3B (2025): Qwen 3 with experts in every layer.

    ``renormalised`` False leaves the chosen experts' softmax weights as they are, with a sum below one.
    """
    return qwen3(
        vocab_size, d_model=d_model, n_heads=n_heads, n_kv_heads=n_kv_heads, head_width=head_width,
        n_layers=n_layers, tied=False,
        feed_forward=Experts(
            n_experts=n_experts, top_k=top_k, expert=gated(expert_width, "silu"), router_bias=False,
            router_order="softmax_then_top_k_renormalised" if renormalised else "softmax_then_top_k",
            load_balance=0.001,
        ),
    )  # fmt: skip


def olmo2(
    vocab_size: int = 100_352,
    *,
    d_model: int = 2048,
    n_heads: int = 16,
    n_kv_heads: int | None = None,
    ffn_width: int = 8192,
    n_layers: int = 16,
    theta: float = 500_000.0,
    eps: float = 1e-6,
    tied: bool = False,
) -> ModelConfig:
    """OLMo 2 1B (OLMo et al. 2025): Llama with norms on the increments and on whole queries and keys."""
    norm = rms_norm(eps, gain_after_cast=True)
    base = llama(
        vocab_size, d_model=d_model, n_heads=n_heads, n_kv_heads=n_kv_heads, ffn_width=ffn_width,
        n_layers=n_layers, theta=theta, tied=tied,
        qk_norm=QKNorm(norm=norm, axis="projection", order="before_rotation"),
    )  # fmt: skip
    return base.replace(
        decoder__layer__placement="res_post", decoder__layer__norm=norm, decoder__final_norm=norm
    )
