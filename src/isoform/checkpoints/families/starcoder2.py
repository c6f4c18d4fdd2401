"""StarCoder2: rotary, grouped queries, a window, LayerNorm and biases."""

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
    Rotary,
)
from isoform.config.presets.build import attention, embedding, layer_norm, two_layer


def read_starcoder2(keys: Keys, kind: HeadKind) -> ModelConfig:
    """StarCoder2."""
    d, heads = keys.integer("hidden_size", 3072), keys.integer("num_attention_heads", 24)
    norm = layer_norm(keys.real("norm_epsilon", 1e-5))
    rotary = read_rotary(keys, head_width=d // heads, theta=10_000.0, max_positions=4096)
    bias = keys.flag("use_bias", True)
    keys.must("norm_type", "layer_norm")
    keys.must("mlp_type", "default")
    keys.skip("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
    keys.skip("activation_function", "layer_norm_epsilon")  # the class reads hidden_act and norm_epsilon
    keys.must("scale_attn_weights", True)
    layer = Layer(
        placement="pre",
        residual="sequential",
        norm=norm,
        attention=attention(
            d, heads, n_kv_heads=keys.integer("num_key_value_heads", 2), bias=bias, positions=rotary,
            window=keys.take("sliding_window", None), dropout=keys.real("attention_dropout", 0.0),
        ),
        feed_forward=two_layer(
            keys.integer("intermediate_size", 12_288), keys.activation("hidden_act", "gelu_pytorch_tanh"),
            bias=bias,
        ),
        residual_dropout=keys.real("residual_dropout", 0.0),
    )  # fmt: skip
    table = embedding(keys.integer("vocab_size"), d, dropout=keys.real("embedding_dropout", 0.0))
    head = decoder_head(keys, kind, tied=keys.flag("tie_word_embeddings", True))
    n = keys.integer("num_hidden_layers", 30)
    keys.done()
    return causal(d, table, n, layer, norm, head)


def write_starcoder2(cfg: ModelConfig) -> dict[str, Any]:
    """StarCoder2."""
    layer = cfg.stack.layer
    rotary = layer.attention.positions
    assert isinstance(rotary, Rotary)
    return {
        **hidden(cfg),
        **write_rotary(rotary),
        "num_key_value_heads": layer.attention.n_kv_heads,
        "norm_epsilon": layer.norm.eps,
        "use_bias": layer.attention.bias.query,
        "sliding_window": layer.attention.window,
        "residual_dropout": layer.residual_dropout,
        "embedding_dropout": cfg.embedding.dropout,
        "tie_word_embeddings": is_tied(cfg),
    }


def map_starcoder2(cfg: ModelConfig) -> FamilyMapping:
    """StarCoder2."""
    layer = (
        Module("attention.before", "input_layernorm"),
        Packed("attention.body.qkv", QKV),
        Module("attention.body.output", "self_attn.o_proj"),
        Module("feed_forward.before", "post_attention_layernorm"),
        Module("feed_forward.body.up", "mlp.c_fc"),
        Module("feed_forward.body.down", "mlp.c_proj"),
    )
    return like_llama(cfg, layer, "model.norm")


FAMILIES = (
    Family(
        "starcoder2",
        classes("Starcoder2"),
        read_starcoder2,
        write_starcoder2,
        map_starcoder2,
        defaults=token_ids(50_256, 50_256),
    ),
)
