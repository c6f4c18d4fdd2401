"""The Gemma families. Defaults are those of the released model that each docstring names."""

from __future__ import annotations

from collections.abc import Iterable

from isoform.config.model import Layer, ModelConfig, TokenHead, Variant
from isoform.config.parts import Attention, NoScaling, QKNorm, Rotary, RotaryScaling
from isoform.config.presets.build import attention, decoder_only, embedding, gated, rms_norm


def gemma(
    vocab_size: int = 256_000,
    *,
    d_model: int = 2048,
    n_heads: int = 8,
    n_kv_heads: int = 1,
    head_width: int = 256,
    ffn_width: int = 16_384,
    n_layers: int = 18,
) -> ModelConfig:
    """Gemma 2B (2024): embeddings times √d, norms that multiply by 1 + w, GEGLU with the tanh GELU."""
    norm = rms_norm(1e-6, gain_offset=1.0, gain_after_cast=True)
    rotary = Rotary(layout="half", theta=10_000.0, width=head_width, precision="float32")
    return decoder_only(
        table=embedding(vocab_size, d_model, scale="sqrt_d_model"),
        n_layers=n_layers,
        layer=Layer(
            placement="pre",
            residual="sequential",
            norm=norm,
            attention=attention(
                d_model, n_heads, n_kv_heads=n_kv_heads, head_width=head_width, bias=False, positions=rotary
            ),
            feed_forward=gated(ffn_width, "gelu_tanh"),
        ),
        final_norm=norm,
        head=TokenHead(tied=True, bias=False),
    )


def gemma2(
    vocab_size: int = 256_000,
    *,
    d_model: int = 2304,
    n_heads: int = 8,
    n_kv_heads: int = 4,
    head_width: int = 256,
    ffn_width: int = 9216,
    n_layers: int = 26,
    window: int = 4096,
    query_scale: float = 256.0,
) -> ModelConfig:
    """Gemma 2 2B (2024): Gemma with sandwich norms, soft caps, and a window on every other layer."""
    base = gemma(
        vocab_size, d_model=d_model, n_heads=n_heads, n_kv_heads=n_kv_heads, head_width=head_width,
        ffn_width=ffn_width, n_layers=n_layers,
    )  # fmt: skip
    full = base.stack.layer.attention.replace(scale=query_scale**-0.5, softcap=50.0)
    sandwiched = _sandwiched(base, full, full.replace(window=window), range(0, n_layers, 2))
    return sandwiched.replace(head__softcap=30.0)


def gemma3(
    vocab_size: int = 262_144,
    *,
    d_model: int = 1152,
    n_heads: int = 4,
    n_kv_heads: int = 1,
    head_width: int = 256,
    ffn_width: int = 6912,
    n_layers: int = 26,
    window: int = 512,
    full_every: int = 6,
    query_scale: float = 256.0,
    theta: float = 1_000_000.0,
    local_theta: float = 10_000.0,
    scaling: RotaryScaling | None = None,
) -> ModelConfig:
    """Gemma 3 1B (2025): Gemma 2 with query/key norms for the caps; five windowed layers to a full one.

    Windowed layers rotate with ``local_theta`` and no scaling, full ones with ``theta`` and ``scaling``.
    """
    base = gemma(
        vocab_size, d_model=d_model, n_heads=n_heads, n_kv_heads=n_kv_heads, head_width=head_width,
        ffn_width=ffn_width, n_layers=n_layers,
    )  # fmt: skip
    norm = QKNorm(norm=base.stack.layer.norm, axis="head", order="before_rotation")
    shared = base.stack.layer.attention.replace(scale=query_scale**-0.5, qk_norm=norm)
    full = shared.replace(positions__theta=theta, positions__scaling=scaling or NoScaling())
    local = shared.replace(positions__theta=local_theta, window=window)
    return _sandwiched(base, full, local, (i for i in range(n_layers) if (i + 1) % full_every))


def _sandwiched(base: ModelConfig, full: Attention, local: Attention, layers: Iterable[int]) -> ModelConfig:
    """Gemma 2 and 3: sandwich norms, ``local`` attention in the given layers and ``full`` in the others."""
    return base.replace(
        decoder__layer__placement="sandwich",
        decoder__layer__attention=full,
        decoder__variants=(Variant(layers=tuple(layers), attention=local),),
    )
