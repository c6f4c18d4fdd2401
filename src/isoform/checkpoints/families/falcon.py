"""Falcon: parallel sublayers with one norm or two, few key/value heads, rotary or ALiBi."""

from __future__ import annotations

from typing import Any, Literal

from isoform.checkpoints import operations as op
from isoform.checkpoints.entries import FamilyMapping, Fused, Ignored, Layers, Module
from isoform.checkpoints.families.decoders import causal, is_tied, other_head, sublayers, tied_head
from isoform.checkpoints.families.family import Family, HeadKind, decoder_head, labels, token_ids
from isoform.checkpoints.families.llama_like import classes
from isoform.checkpoints.families.rotary import read_rotary, write_rotary
from isoform.checkpoints.keys import NAMES, Keys
from isoform.config import Alibi, Layer, ModelConfig, Rotary, TwoLayer
from isoform.config.presets.build import attention, embedding, layer_norm, two_layer
from isoform.errors import ArtifactError


def read_falcon(keys: Keys, kind: HeadKind) -> ModelConfig:
    """Falcon 7B, 40B, 180B and RW."""
    d = keys.integer("hidden_size", 4544)
    heads = keys.take("num_attention_heads", None) or keys.integer("n_head", 71)
    n = keys.take("num_hidden_layers", None) or keys.integer("n_layer", 32)
    keys.skip("n_head", "n_layer", "ff_factor")  # the last is said by ffn_hidden_size
    width = d // heads
    new = keys.flag("new_decoder_architecture", False)
    parallel = keys.flag("parallel_attn", True)
    shared = keys.flag("multi_query", True)
    given = keys.take("num_kv_heads", None) or keys.take("n_head_kv", None) or heads
    keys.skip("n_head_kv")
    kv = given if new else 1 if shared else heads
    norms = keys.take("num_ln_in_parallel_attn", None) or (2 if new else 1)
    if new and not parallel:
        raise ArtifactError(f"{keys.where}: new_decoder_architecture without parallel_attn is not supported")
    norm = layer_norm(keys.real("layer_norm_epsilon", 1e-5))
    rotary = read_rotary(keys, head_width=width, theta=10_000.0, max_positions=2048)
    alibi = keys.flag("alibi", False)
    bias = keys.flag("bias", False)
    keys.must("apply_residual_connection_post_layernorm", False)
    layer = Layer(
        placement="pre",
        residual=_residual(parallel, new and norms == 2),
        norm=norm,
        attention=attention(
            d, heads, n_kv_heads=kv, bias=bias, dropout=keys.real("attention_dropout", 0.0),
            positions=Alibi(factor=width**-0.5, rounding="bfloat16") if alibi else rotary,
        ),
        feed_forward=two_layer(
            keys.take("ffn_hidden_size", None) or 4 * d, keys.activation("activation", "gelu"), bias=bias
        ),
        residual_dropout=keys.real("hidden_dropout", 0.0),
    )  # fmt: skip
    table = embedding(keys.integer("vocab_size"), d)
    head = decoder_head(keys, kind, tied=keys.flag("tie_word_embeddings", True))
    keys.done()
    return causal(d, table, n, layer, norm, head)


def _residual(parallel: bool, two_norms: bool) -> Literal["sequential", "parallel", "parallel_shared_norm"]:
    if not parallel:
        return "sequential"
    return "parallel" if two_norms else "parallel_shared_norm"


def write_falcon(cfg: ModelConfig) -> dict[str, Any]:
    """Falcon; one key/value head or as many as there are heads is said the old way, else the new."""
    layer, attention = cfg.stack.layer, cfg.stack.layer.attention
    network = layer.feed_forward
    assert isinstance(network, TwoLayer)
    new = _is_new(cfg)
    return {
        "vocab_size": cfg.embedding.vocab_size,
        "hidden_size": cfg.d_model,
        "num_hidden_layers": cfg.stack.n_layers,
        "num_attention_heads": attention.n_heads,
        "num_kv_heads": attention.n_kv_heads,
        "new_decoder_architecture": new,
        "multi_query": attention.n_kv_heads == 1 and not new,
        "parallel_attn": layer.residual != "sequential",
        "num_ln_in_parallel_attn": 2 if layer.residual == "parallel" else 1,
        "alibi": isinstance(attention.positions, Alibi),
        "bias": network.bias_up,
        "ffn_hidden_size": network.width,
        "activation": NAMES[network.activation],
        "layer_norm_epsilon": layer.norm.eps,
        "attention_dropout": attention.dropout,
        "hidden_dropout": layer.residual_dropout,
        "tie_word_embeddings": is_tied(cfg),
        **labels(cfg.head),
        **(write_rotary(attention.positions) if isinstance(attention.positions, Rotary) else {}),
    }


def _is_new(cfg: ModelConfig) -> bool:
    attention = cfg.stack.layer.attention
    return cfg.stack.layer.residual == "parallel" or attention.n_kv_heads not in (1, attention.n_heads)


def map_falcon(cfg: ModelConfig) -> FamilyMapping:
    """The fused projection is ordered by group in the new architecture, by head or in thirds in the old."""
    attention = cfg.stack.layer.attention
    # With one key/value head the group is everything: its order and that of thirds are the same.
    order = op.per_head if attention.n_kv_heads == attention.n_heads and not _is_new(cfg) else op.per_group
    two = cfg.stack.layer.residual == "parallel"
    layer = (
        *(
            Module(name, "ln_attn" if two else "input_layernorm")
            for name in ("attention_norm", "attention.before")
        ),
        Module("feed_forward_norm", "ln_mlp"),
        Module("feed_forward.before", "post_attention_layernorm"),
        Fused("attention.body", "self_attention.query_key_value", order),
        Fused("attention", "self_attention.query_key_value", order),
        *sublayers(
            (Module("output", "self_attention.dense"),),
            (Module("up", "mlp.dense_h_to_4h"), Module("down", "mlp.dense_4h_to_h")),
        ),
    )
    return FamilyMapping(
        entries=(
            Module("embedding", "transformer.word_embeddings"),
            Layers("decoder", "transformer.h.{}.", layer),
            Module("decoder.final_norm", "transformer.ln_f"),
            Module("head.labels", "score"),
            Module("head", "lm_head"),
        ),
        ties=tied_head(cfg, "lm_head.weight", "transformer.word_embeddings.weight"),
        ignored=(
            Ignored("*rotary*.inv_freq", "rebuilt from the configuration"),
            *other_head(cfg, "lm_head.weight"),
        ),
        base="transformer.",
        heads=("lm_head.", "score."),
    )


FAMILIES = (
    Family("falcon", classes("Falcon"), read_falcon, write_falcon, map_falcon, defaults=token_ids(11, 11)),
)
