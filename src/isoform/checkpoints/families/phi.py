"""Phi: one norm for parallel sublayers, partial rotary, a head with a bias."""

from __future__ import annotations

from typing import Any

from isoform.checkpoints.entries import FamilyMapping, Module, Packed
from isoform.checkpoints.families.decoders import (
    causal,
    hidden,
    is_tied,
    like_llama,
)
from isoform.checkpoints.families.family import Family, HeadKind, decoder_head, token_ids
from isoform.checkpoints.families.llama_like import QKV, classes
from isoform.checkpoints.families.rotary import read_rotary, write_rotary
from isoform.checkpoints.keys import Keys
from isoform.config import (
    Layer,
    ModelConfig,
    QKNorm,
    Rotary,
)
from isoform.config.presets.build import attention, embedding, layer_norm, two_layer


def read_phi(keys: Keys, kind: HeadKind) -> ModelConfig:
    """Phi 1, 1.5 and 2."""
    d, heads = keys.integer("hidden_size", 2048), keys.integer("num_attention_heads", 32)
    norm = layer_norm(keys.real("layer_norm_eps", 1e-5))
    rotary = read_rotary(
        keys, head_width=d // heads, theta=10_000.0, max_positions=2048, share=0.5, share_key=True
    )
    normed = keys.flag("qk_layernorm", False)
    layer = Layer(
        placement="pre",
        residual="parallel_shared_norm",
        norm=norm,
        attention=attention(
            d, heads, n_kv_heads=keys.take("num_key_value_heads", None), bias=True, positions=rotary,
            qk_norm=QKNorm(norm=norm, axis="head", order="before_rotation") if normed else None,
            dropout=keys.real("attention_dropout", 0.0),
        ),
        feed_forward=two_layer(
            keys.integer("intermediate_size", 8192), keys.activation("hidden_act", "gelu_new"), bias=True
        ),
        residual_dropout=keys.real("resid_pdrop", 0.0),
    )  # fmt: skip
    table = embedding(keys.integer("vocab_size"), d, dropout=keys.real("embd_pdrop", 0.0))
    head = decoder_head(keys, kind, tied=keys.flag("tie_word_embeddings", False), bias=True)
    n = keys.integer("num_hidden_layers", 24)
    keys.done()
    return causal(d, table, n, layer, norm, head)


def write_phi(cfg: ModelConfig) -> dict[str, Any]:
    """Phi."""
    layer = cfg.stack.layer
    rotary = layer.attention.positions
    assert isinstance(rotary, Rotary)
    return {
        **hidden(cfg),
        **write_rotary(rotary, share_key=True, head_width=layer.attention.head_width),
        "num_key_value_heads": layer.attention.n_kv_heads,
        "qk_layernorm": layer.attention.qk_norm is not None,
        "layer_norm_eps": layer.norm.eps,
        "resid_pdrop": layer.residual_dropout,
        "embd_pdrop": cfg.embedding.dropout,
        "tie_word_embeddings": is_tied(cfg),
    }


def map_phi(cfg: ModelConfig) -> FamilyMapping:
    """Phi."""
    layer = (
        Module("attention_norm", "input_layernorm"),
        Packed("attention.qkv", QKV),
        Module("attention.output", "self_attn.dense"),
        Module("attention.query_norm", "self_attn.q_layernorm"),
        Module("attention.key_norm", "self_attn.k_layernorm"),
        Module("feed_forward.up", "mlp.fc1"),
        Module("feed_forward.down", "mlp.fc2"),
    )
    return like_llama(cfg, layer, "model.final_layernorm")


FAMILIES = (Family("phi", classes("Phi"), read_phi, write_phi, map_phi, defaults=token_ids(1, 2)),)
