"""What Llama and the families that follow it share: RMSNorm, rotary embedding, gated networks."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from isoform.checkpoints.entries import ExpertGroup, FamilyMapping, Ignored, Layers, Module, Packed, Tied
from isoform.checkpoints.families.family import HeadKind, decoder_head, labels
from isoform.checkpoints.families.rotary import read_rotary, write_rotary
from isoform.checkpoints.keys import NAMES, Keys
from isoform.config import (
    Attention,
    AttentionBias,
    Embedding,
    FeedForward,
    Gated,
    Layer,
    ModelConfig,
    NoPositions,
    Norm,
    QKNorm,
    Rotary,
    Stack,
    TokenHead,
    Variant,
)

Placement = Literal["pre", "sandwich", "res_post"]


@dataclasses.dataclass(frozen=True)
class Defaults:
    """What the classes assume when a key is absent; only what they do not share."""

    theta: float = 10_000.0
    max_positions: int = 2048
    kv_heads: int | None = None
    head_dim: int | None = None
    eps: float = 1e-6
    tied: bool = False
    activation: str = "silu"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The keys that all of them have."""

    vocab: int
    d: int
    layers: int
    heads: int
    kv: int
    width: int
    eps: float
    tied: bool


def read_sizes(keys: Keys, defaults: Defaults) -> Sizes:
    """The common keys."""
    d, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    kv = keys.take("num_key_value_heads", defaults.kv_heads) or heads
    return Sizes(
        vocab=keys.integer("vocab_size"),
        d=d,
        layers=keys.integer("num_hidden_layers"),
        heads=heads,
        kv=kv,
        width=keys.take("head_dim", defaults.head_dim) or d // heads,
        eps=keys.real("rms_norm_eps", defaults.eps),
        tied=keys.flag("tie_word_embeddings", defaults.tied),
    )


def rotary_of(keys: Keys, sizes: Sizes, defaults: Defaults) -> Rotary:
    """The rotary setting of all layers."""
    return read_rotary(
        keys, head_width=sizes.width, theta=defaults.theta, max_positions=defaults.max_positions
    )


def rms(eps: float, *, gemma: bool = False, after_cast: bool = False) -> Norm:
    """RMSNorm with a gain, 1 + w in Gemma."""
    return Norm(
        kind="rms",
        eps=eps,
        bias=False,
        gain_offset=1.0 if gemma else 0.0,
        gain_after_cast=gemma or after_cast,
    )


def make_attention(
    keys: Keys,
    sizes: Sizes,
    rotary: Rotary,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: QKNorm | None = None,
    window: int | None = None,
    scale: float | Literal["inverse_sqrt_head_width"] = "inverse_sqrt_head_width",
    softcap: float | None = None,
) -> Attention:
    """Self-attention from the common keys and what a family adds."""
    return Attention(
        n_heads=sizes.heads,
        n_kv_heads=sizes.kv,
        head_width=sizes.width,
        scale=scale,
        bias=AttentionBias(query=qkv_bias, key=qkv_bias, value=qkv_bias, output=output_bias),
        positions=rotary,
        qk_norm=qk_norm,
        softcap=softcap,
        window=window,
        dropout=keys.real("attention_dropout", 0.0),
    )


def gated(keys: Keys, activation: str, *, bias: bool = False, width: str = "intermediate_size") -> Gated:
    """The gated network."""
    return Gated(
        width=keys.integer(width),
        activation=keys.activation("hidden_act", activation),
        bias_gate=bias,
        bias_up=bias,
        bias_down=bias,
    )


def make_decoder(
    keys: Keys,
    kind: HeadKind,
    sizes: Sizes,
    attention: Attention,
    feed_forward: FeedForward,
    norm: Norm,
    *,
    placement: Placement = "pre",
    scale: float | Literal["sqrt_d_model"] = 1.0,
    softcap: float | None = None,
    variants: tuple[Variant, ...] = (),
) -> ModelConfig:
    """The network."""
    head = decoder_head(keys, kind, tied=sizes.tied)
    if isinstance(head, TokenHead) and softcap is not None:
        head = head.replace(softcap=softcap)
    keys.done()
    return ModelConfig(
        d_model=sizes.d,
        embedding=Embedding(
            vocabulary="shared", vocab_size=sizes.vocab, width=sizes.d, scale=scale, positions=NoPositions()
        ),
        decoder=Stack(
            n_layers=sizes.layers,
            visibility="causal",
            layer=Layer(
                placement=placement,
                residual="sequential",
                norm=norm,
                attention=attention,
                feed_forward=feed_forward,
            ),
            variants=variants,
            final_norm=norm,
        ),
        head=head,
    )


def windowed(
    layers: list[int], full: Attention, local: Attention, n: int
) -> tuple[Attention, tuple[Variant, ...]]:
    """The stack's attention and the variant for windowed layers; no variant when all layers agree."""
    if len(layers) == n:
        return local, ()
    return full, ((Variant(layers=tuple(layers), attention=local),) if layers else ())


def write_common(cfg: ModelConfig) -> dict[str, Any]:
    """The keys that all of them have."""
    stack = cfg.stack
    attention, norm = stack.layer.attention, stack.layer.norm
    rotary = attention.positions
    assert isinstance(rotary, Rotary)
    return {
        "vocab_size": cfg.embedding.vocab_size,
        "hidden_size": cfg.d_model,
        "num_hidden_layers": stack.n_layers,
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads,
        "head_dim": attention.head_width,
        "rms_norm_eps": norm.eps,
        "tie_word_embeddings": isinstance(cfg.head, TokenHead) and cfg.head.tied,
        "attention_dropout": attention.dropout,
        **labels(cfg.head),
        **write_rotary(rotary),
    }


def write_network(network: FeedForward) -> dict[str, Any]:
    """A gated network's keys."""
    assert isinstance(network, Gated)
    return {"intermediate_size": network.width, "hidden_act": NAMES[network.activation]}


QKV = (("query", "self_attn.q_proj"), ("key", "self_attn.k_proj"), ("value", "self_attn.v_proj"))
NORMS = (("attention.before", "input_layernorm"), ("feed_forward.before", "post_attention_layernorm"))


def mapped(
    cfg: ModelConfig, *, norms: tuple[tuple[str, str], ...] = NORMS, experts: ExpertGroup | None = None
) -> FamilyMapping:
    """The tensors; ``norms`` names those of a layer."""
    layer = (
        Packed("attention.body.qkv", QKV),
        Module("attention.body.output", "self_attn.o_proj"),
        Module("attention.body.query_norm", "self_attn.q_norm"),
        Module("attention.body.key_norm", "self_attn.k_norm"),
        *(Module(ours, theirs) for ours, theirs in norms),
        Packed("feed_forward.body.gate_up", (("gate", "mlp.gate_proj"), ("up", "mlp.up_proj"))),
        Module("feed_forward.body.down", "mlp.down_proj"),
        *((experts,) if experts is not None else ()),
    )
    tied = isinstance(cfg.head, TokenHead) and cfg.head.tied
    return FamilyMapping(
        entries=(
            Module("embedding", "model.embed_tokens"),
            Layers("decoder", "model.layers.{}.", layer),
            Module("decoder.final_norm", "model.norm"),
            Module("head.labels", "score"),
            Module("head", "lm_head"),
        ),
        ties=(Tied("lm_head.weight", "model.embed_tokens.weight"),) if tied else (),
        ignored=(
            Ignored("*rotary_emb.inv_freq", "rebuilt from the configuration"),
            *(() if isinstance(cfg.head, TokenHead) else (Ignored("lm_head.weight", "of another head"),)),
        ),
        base="model.",
        heads=("lm_head.", "score."),
    )


def classes(name: str) -> dict[str, HeadKind]:
    """The classes that every decoder family has."""
    return {
        f"{name}ForCausalLM": "tokens",
        f"{name}Model": "states",
        f"{name}ForSequenceClassification": "sequence",
    }
