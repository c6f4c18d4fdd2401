"""Named configurations: the chapter's two, and one for each family. Every preset is an ordinary `ModelConfig`.

A preset is a starting point, not a mode: whatever it sets is written out in the value it returns.
"""

from __future__ import annotations

from typing import Literal

from isoform.config.model import (
    Embedding,
    Layer,
    ModelConfig,
    Pooler,
    PoolingHead,
    Stack,
    TokenHead,
    Transform,
)
from isoform.config.parts import (
    ActivationName,
    AddedPositions,
    Alibi,
    Attention,
    AttentionBias,
    AttentionPositions,
    FeedForward,
    Gated,
    Learned,
    NoPositions,
    Norm,
    QKNorm,
    RelativeBuckets,
    Rotary,
    Sinusoidal,
    TwoLayer,
)

SINUSOIDAL = Sinusoidal(
    layout="interleaved", spacing="half_width", offset=0, base=10_000.0, precision="float64"
)
NONE = NoPositions()


def layer_norm(eps: float) -> Norm:
    """LayerNorm with gain and bias (6.14)."""
    return Norm(kind="layer", eps=eps, bias=True)


def rms_norm(eps: float, *, gain_offset: Literal[0.0, 1.0] = 0.0, gain_after_cast: bool = False) -> Norm:
    """RMSNorm (6.18)."""
    return Norm(kind="rms", eps=eps, bias=False, gain_offset=gain_offset, gain_after_cast=gain_after_cast)


def attention(
    d_model: int,
    n_heads: int,
    *,
    n_kv_heads: int | None = None,
    head_width: int | None = None,
    bias: bool | tuple[bool, bool, bool, bool],
    positions: AttentionPositions = NONE,
    scale: float | Literal["inverse_sqrt_head_width"] = "inverse_sqrt_head_width",
    qk_norm: QKNorm | None = None,
    softcap: float | None = None,
    window: int | None = None,
    dropout: float = 0.0,
) -> Attention:
    """Attention with the standard layout d = h·d_h (R3) unless ``head_width`` says otherwise."""
    q, k, v, o = bias if isinstance(bias, tuple) else (bias,) * 4
    return Attention(
        n_heads=n_heads,
        n_kv_heads=n_kv_heads or n_heads,
        head_width=head_width or d_model // n_heads,
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
    d_model: int,
    positions: AddedPositions = NONE,
    *,
    scale: float | Literal["sqrt_d_model"] = 1.0,
    norm: Norm | None = None,
    n_token_types: int = 0,
    dropout: float = 0.0,
    vocabulary: str = "shared",
) -> Embedding:
    """A table of the model's own width."""
    return Embedding(
        vocabulary=vocabulary,
        vocab_size=vocab_size,
        width=d_model,
        scale=scale,
        positions=positions,
        n_token_types=n_token_types,
        norm=norm,
        dropout=dropout,
    )


def _encoder_decoder(
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
    encoder_positions: AttentionPositions = NONE,
    decoder_positions: AttentionPositions = NONE,
) -> ModelConfig:
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
        ),
        decoder=Stack(
            n_layers=n_decoder_layers,
            visibility="causal",
            layer=layer(decoder_positions, True),
            final_norm=final_norm,
        ),
        head=head,
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
    return _encoder_decoder(
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


# --- encoders ---------------------------------------------------------------------------------------------


def bert(
    vocab_size: int = 30_522,
    *,
    d_model: int = 768,
    n_heads: int = 12,
    ffn_width: int = 3072,
    n_layers: int = 12,
    max_positions: int = 512,
    position_offset: int = 0,
    n_token_types: int = 2,
    dropout: float = 0.1,
    eps: float = 1e-12,
    head: Literal["masked_token", "pooled"] = "masked_token",
) -> ModelConfig:
    """BERT (Devlin et al. 2019): Post-LN, exact GELU, learned positions, embedding norm."""
    norm = layer_norm(eps)
    heads = {
        "masked_token": TokenHead(
            tied=True, bias=True, transform=Transform(activation="gelu", bias=True, norm=norm)
        ),
        "pooled": PoolingHead(pooling="first", pooler=Pooler(activation="tanh", bias=True), normalise=False),
    }
    return ModelConfig(
        d_model=d_model,
        embedding=embedding(
            vocab_size,
            d_model,
            Learned(max_positions=max_positions, offset=position_offset),
            norm=norm,
            n_token_types=n_token_types,
            dropout=dropout,
        ),
        encoder=Stack(
            n_layers=n_layers,
            visibility="bidirectional",
            layer=Layer(
                placement="post",
                residual="sequential",
                norm=norm,
                attention=attention(d_model, n_heads, bias=True, dropout=dropout),
                feed_forward=two_layer(ffn_width, "gelu", bias=True),
                residual_dropout=dropout,
            ),
            final_norm=None,
        ),
        head=heads[head],
    )


def roberta(
    vocab_size: int = 50_265,
    *,
    d_model: int = 768,
    n_heads: int = 12,
    ffn_width: int = 3072,
    n_layers: int = 12,
    max_positions: int = 512,
    dropout: float = 0.1,
    eps: float = 1e-5,
    head: Literal["masked_token", "pooled"] = "masked_token",
) -> ModelConfig:
    """RoBERTa (Liu et al. 2019): BERT whose positions start at 2 and whose token types are one."""
    return bert(
        vocab_size, d_model=d_model, n_heads=n_heads, ffn_width=ffn_width, n_layers=n_layers,
        max_positions=max_positions, position_offset=2, n_token_types=1, dropout=dropout, eps=eps, head=head,
    )  # fmt: skip


# --- decoders ---------------------------------------------------------------------------------------------


def _decoder(
    *,
    table: Embedding,
    n_layers: int,
    layer: Layer,
    final_norm: Norm | None,
    head: TokenHead,
    visibility: Literal["causal", "prefix"] = "causal",
) -> ModelConfig:
    return ModelConfig(
        d_model=table.width,
        embedding=table,
        decoder=Stack(n_layers=n_layers, visibility=visibility, layer=layer, final_norm=final_norm),
        head=head,
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
    """GPT-2 (Radford et al. 2019): Pre-LN, tanh GELU, learned positions, tied head."""
    norm = layer_norm(eps)
    return _decoder(
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
    vocab_size: int = 50_432,
    *,
    d_model: int = 512,
    n_heads: int = 8,
    ffn_width: int = 2048,
    n_layers: int = 6,
    rotary_share: float = 0.25,
    theta: float = 10_000.0,
    parallel: bool = True,
    eps: float = 1e-5,
) -> ModelConfig:
    """GPT-NeoX and Pythia (Black et al. 2022): parallel residual, partial rotary, untied head."""
    norm = layer_norm(eps)
    rotary = Rotary(
        layout="half", theta=theta, width=int(d_model // n_heads * rotary_share), precision="float32"
    )
    return _decoder(
        table=embedding(vocab_size, d_model),
        n_layers=n_layers,
        layer=Layer(
            placement="pre",
            residual="parallel" if parallel else "sequential",
            norm=norm,
            attention=attention(d_model, n_heads, bias=True, positions=rotary),
            feed_forward=two_layer(ffn_width, "gelu", bias=True),
        ),
        final_norm=norm,
        head=TokenHead(tied=False, bias=False),
    )


def opt(
    vocab_size: int = 50_272,
    *,
    d_model: int = 768,
    n_heads: int = 12,
    ffn_width: int = 3072,
    n_layers: int = 12,
    max_positions: int = 2048,
    dropout: float = 0.1,
) -> ModelConfig:
    """OPT (Zhang et al. 2022): Pre-LN, ReLU, learned positions that start at 2."""
    norm = layer_norm(1e-5)
    return _decoder(
        table=embedding(vocab_size, d_model, Learned(max_positions=max_positions, offset=2)),
        n_layers=n_layers,
        layer=Layer(
            placement="pre",
            residual="sequential",
            norm=norm,
            attention=attention(d_model, n_heads, bias=True),
            feed_forward=two_layer(ffn_width, "relu", bias=True),
            residual_dropout=dropout,
        ),
        final_norm=norm,
        head=TokenHead(tied=True, bias=False),
    )


def bloom(
    vocab_size: int = 250_880,
    *,
    d_model: int = 1024,
    n_heads: int = 16,
    n_layers: int = 24,
    eps: float = 1e-5,
) -> ModelConfig:
    """BLOOM (Le Scao et al. 2022): ALiBi, embedding norm, tanh GELU, tied head."""
    norm = layer_norm(eps)
    return _decoder(
        table=embedding(vocab_size, d_model, norm=norm),
        n_layers=n_layers,
        layer=Layer(
            placement="pre",
            residual="sequential",
            norm=norm,
            attention=attention(d_model, n_heads, bias=True, positions=Alibi()),
            feed_forward=two_layer(4 * d_model, "gelu_tanh", bias=True),
        ),
        final_norm=norm,
        head=TokenHead(tied=True, bias=False),
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
    eps: float = 1e-6,
    tied: bool = False,
    bias: bool | tuple[bool, bool, bool, bool] = False,
    qk_norm: QKNorm | None = None,
    window: int | None = None,
) -> ModelConfig:
    """Llama (Touvron et al. 2023): Pre-RMSNorm, SwiGLU, rotary in the half layout, no biases."""
    norm = rms_norm(eps)
    width = head_width or d_model // n_heads
    rotary = Rotary(layout="half", theta=theta, width=width, precision="float32")
    return _decoder(
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
            feed_forward=gated(ffn_width, "silu"),
        ),
        final_norm=norm,
        head=TokenHead(tied=tied, bias=False),
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
    """Mistral 7B (Jiang et al. 2023): Llama with grouped queries and a sliding window."""
    return llama(
        vocab_size, d_model=d_model, n_heads=n_heads, n_kv_heads=n_kv_heads, ffn_width=ffn_width,
        n_layers=n_layers, eps=1e-5, window=window,
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
    """Qwen 2: Llama with biases on query, key and value."""
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
) -> ModelConfig:
    """Qwen 3: Llama with its own head width and RMSNorm on every query and key head before rotation."""
    return llama(
        vocab_size, d_model=d_model, n_heads=n_heads, n_kv_heads=n_kv_heads, head_width=head_width,
        ffn_width=ffn_width, n_layers=n_layers, theta=1_000_000.0, tied=tied,
        qk_norm=QKNorm(norm=rms_norm(1e-6), axis="head", order="before_rotation"),
    )  # fmt: skip


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
    """Gemma (2024): embeddings times √d, norms that multiply by 1 + w, GEGLU with the tanh GELU."""
    norm = rms_norm(1e-6, gain_offset=1.0, gain_after_cast=True)
    rotary = Rotary(layout="half", theta=10_000.0, width=head_width, precision="float32")
    return _decoder(
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
    """Gemma 2 (2024): Gemma with sandwich norms, soft caps, and a window on every other layer."""
    from isoform.config.model import Variant

    base = gemma(
        vocab_size, d_model=d_model, n_heads=n_heads, n_kv_heads=n_kv_heads, head_width=head_width,
        ffn_width=ffn_width, n_layers=n_layers,
    )  # fmt: skip
    assert base.decoder is not None
    full = base.decoder.layer.attention.replace(scale=query_scale**-0.5, softcap=50.0)
    local = Variant(layers=tuple(range(0, n_layers, 2)), attention=full.replace(window=window))
    layer = base.decoder.layer.replace(placement="sandwich", attention=full)
    return base.replace(
        decoder=base.decoder.replace(layer=layer, variants=(local,)),
        head=TokenHead(tied=True, bias=False, softcap=30.0),
    )


# --- encoder–decoders -------------------------------------------------------------------------------------


def t5(
    vocab_size: int = 32_128,
    *,
    d_model: int = 512,
    n_heads: int = 8,
    head_width: int = 64,
    ffn_width: int = 2048,
    n_layers: int = 6,
    gated_activation: Literal["gelu_tanh"] | None = None,
    tied: bool = True,
    dropout: float = 0.1,
) -> ModelConfig:
    """T5 (Raffel et al. 2020): Pre-RMSNorm, unscaled scores, relative buckets, scaled tied head.

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

    return _encoder_decoder(
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
) -> ModelConfig:
    """BART (Lewis et al. 2020): Post-LN, exact GELU, learned positions from 2, embedding norm, head bias."""
    norm = layer_norm(1e-5)
    table = embedding(
        vocab_size, d_model, Learned(max_positions=max_positions, offset=2), norm=norm, dropout=dropout,
        scale="sqrt_d_model" if scale_embedding else 1.0,
    )  # fmt: skip
    return _encoder_decoder(
        d_model=d_model,
        n_encoder_layers=n_layers,
        n_decoder_layers=n_layers,
        placement=placement,
        norm=norm,
        final_norm=norm if placement == "pre" else None,
        self_attention=attention(d_model, n_heads, bias=True),
        feed_forward=two_layer(ffn_width, activation, bias=True),
        target=table,
        source=table,
        tie_source=True,
        head=TokenHead(tied=True, bias=True),
        residual_dropout=dropout,
    )


def mbart(
    vocab_size: int = 250_027,
    *,
    d_model: int = 1024,
    n_heads: int = 16,
    ffn_width: int = 4096,
    n_layers: int = 12,
    max_positions: int = 1024,
    dropout: float = 0.1,
) -> ModelConfig:
    """mBART (Liu et al. 2020): BART in Pre-LN with final norms and scaled embeddings."""
    return bart(
        vocab_size, d_model=d_model, n_heads=n_heads, ffn_width=ffn_width, n_layers=n_layers,
        max_positions=max_positions, scale_embedding=True, placement="pre", dropout=dropout,
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
    """Marian (Junczys-Dowmunt et al. 2018, OPUS-MT): Post-LN, concatenated sinusoids, scaled tied tables."""
    positions = Sinusoidal(
        layout="concatenated", spacing="half_width", offset=0, base=10_000.0, precision="float64_to_float32"
    )
    table = embedding(vocab_size, d_model, positions, scale="sqrt_d_model", dropout=dropout)
    return _encoder_decoder(
        d_model=d_model,
        n_encoder_layers=n_layers,
        n_decoder_layers=n_layers,
        placement="post",
        norm=layer_norm(1e-5),
        final_norm=None,
        self_attention=attention(d_model, n_heads, bias=True),
        feed_forward=two_layer(ffn_width, activation, bias=True),
        target=table,
        source=table,
        tie_source=True,
        head=TokenHead(tied=True, bias=True),
        residual_dropout=dropout,
    )


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
) -> ModelConfig:
    """`torch.nn.Transformer`: as `original`, but with a final norm in both stacks also in Post-LN."""
    base = (pre_ln if norm_first else original)(
        vocab_size, d_model=d_model, n_heads=n_heads, ffn_width=ffn_width, n_encoder_layers=n_encoder_layers,
        n_decoder_layers=n_decoder_layers, dropout=dropout, eps=eps,
    )  # fmt: skip
    assert base.encoder is not None and base.decoder is not None
    feed_forward = base.decoder.layer.feed_forward.replace(activation=activation)
    return base.replace(
        encoder__final_norm=layer_norm(eps),
        decoder__final_norm=layer_norm(eps),
        encoder__layer__feed_forward=feed_forward,
        decoder__layer__feed_forward=feed_forward,
    )


PRESETS = {
    function.__name__: function
    for function in (
        original, pre_ln, bert, roberta, gpt2, gpt_neox, opt, bloom, llama, mistral, qwen2, qwen3, gemma, gemma2,
        t5, bart, mbart, marian, torch_nn,
    )
}  # fmt: skip
