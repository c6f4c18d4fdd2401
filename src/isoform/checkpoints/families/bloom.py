"""BLOOM: ALiBi, an embedding norm, fused projections ordered by head."""

from __future__ import annotations

from typing import Any

from isoform.checkpoints import operations as op
from isoform.checkpoints.entries import FamilyMapping, Fused, Layers, Module
from isoform.checkpoints.families.decoders import (
    causal,
    is_tied,
    other_head,
    tied_head,
)
from isoform.checkpoints.families.family import Family, HeadKind, decoder_head, labels, token_ids
from isoform.checkpoints.families.llama_like import classes
from isoform.checkpoints.keys import Keys
from isoform.config import (
    Alibi,
    Layer,
    ModelConfig,
)
from isoform.config.presets.build import attention, embedding, layer_norm, two_layer


def read_bloom(keys: Keys, kind: HeadKind) -> ModelConfig:
    """BLOOM."""
    d = keys.take("hidden_size", None) or keys.integer("n_embed", 64)
    heads = keys.take("num_attention_heads", None) or keys.integer("n_head", 8)
    n = keys.take("num_hidden_layers", None) or keys.integer("n_layer", 2)
    keys.skip("n_embed", "n_head", "n_layer")
    keys.skip("slow_but_exact", "attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion")
    keys.skip("offset_alibi", "seq_length", "skip_bias_add", "skip_bias_add_qkv")
    keys.must("n_inner", None, 4 * d)
    norm = layer_norm(keys.real("layer_norm_epsilon", 1e-5))
    after = keys.flag("apply_residual_connection_post_layernorm", False)
    layer = Layer(
        placement="pre",
        residual="sequential",
        residual_source="normalised" if after else "input",
        norm=norm,
        attention=attention(
            d, heads, bias=True, positions=Alibi(), dropout=keys.real("attention_dropout", 0.0)
        ),
        feed_forward=two_layer(4 * d, "gelu_tanh", bias=True),
        residual_dropout=keys.real("hidden_dropout", 0.0),
    )
    table = embedding(keys.integer("vocab_size"), d, norm=norm)
    head = decoder_head(keys, kind, tied=keys.flag("tie_word_embeddings", True))
    keys.done()
    return causal(d, table, n, layer, norm, head)


def write_bloom(cfg: ModelConfig) -> dict[str, Any]:
    """BLOOM."""
    layer = cfg.stack.layer
    return {
        "vocab_size": cfg.embedding.vocab_size,
        "hidden_size": cfg.d_model,
        "n_layer": cfg.stack.n_layers,
        "n_head": layer.attention.n_heads,
        "layer_norm_epsilon": layer.norm.eps,
        "apply_residual_connection_post_layernorm": layer.residual_source == "normalised",
        "attention_dropout": layer.attention.dropout,
        "hidden_dropout": layer.residual_dropout,
        "tie_word_embeddings": is_tied(cfg),
        **labels(cfg.head),
    }


def map_bloom(cfg: ModelConfig) -> FamilyMapping:
    """BLOOM fuses query, key and value head by head."""
    layer = (
        Module("attention.before", "input_layernorm"),
        Fused("attention.body", "self_attention.query_key_value", op.per_head),
        Module("attention.body.output", "self_attention.dense"),
        Module("feed_forward.before", "post_attention_layernorm"),
        Module("feed_forward.body.up", "mlp.dense_h_to_4h"),
        Module("feed_forward.body.down", "mlp.dense_4h_to_h"),
    )
    return FamilyMapping(
        entries=(
            Module("embedding", "transformer.word_embeddings"),
            Module("embedding.norm", "transformer.word_embeddings_layernorm"),
            Layers("decoder", "transformer.h.{}.", layer),
            Module("decoder.final_norm", "transformer.ln_f"),
            Module("head.labels", "score"),
            Module("head", "lm_head"),
        ),
        ties=tied_head(cfg, "lm_head.weight", "transformer.word_embeddings.weight"),
        ignored=other_head(cfg, "lm_head.weight"),
        base="transformer.",
        heads=("lm_head.", "score."),
    )


FAMILIES = (Family("bloom", classes("Bloom"), read_bloom, write_bloom, map_bloom, defaults=token_ids(1, 2)),)
