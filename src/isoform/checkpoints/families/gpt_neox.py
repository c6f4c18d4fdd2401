"""GPT-NeoX and Pythia: parallel residual, partial rotary, fused projections ordered by head."""

from __future__ import annotations

from typing import Any

from isoform.checkpoints import operations as op
from isoform.checkpoints.entries import FamilyMapping, Fused, Ignored, Layers, Module
from isoform.checkpoints.families.decoders import (
    causal,
    hidden,
    is_tied,
    other_head,
    sublayers,
    tied_head,
)
from isoform.checkpoints.families.family import Family, HeadKind, decoder_head, token_ids
from isoform.checkpoints.families.llama_like import classes
from isoform.checkpoints.families.rotary import read_rotary, write_rotary
from isoform.checkpoints.keys import Keys
from isoform.config import (
    Layer,
    ModelConfig,
    Rotary,
)
from isoform.config.presets.build import attention, embedding, layer_norm, two_layer


def read_gpt_neox(keys: Keys, kind: HeadKind) -> ModelConfig:
    """GPT-NeoX, Pythia."""
    d, heads = keys.integer("hidden_size", 6144), keys.integer("num_attention_heads", 64)
    norm = layer_norm(keys.real("layer_norm_eps", 1e-5))
    rotary = read_rotary(
        keys,
        head_width=d // heads,
        theta=keys.real("rotary_emb_base", 10_000.0),
        max_positions=2048,
        share=keys.real("rotary_pct", 0.25),
        share_key=True,
    )
    bias = keys.flag("attention_bias", True)
    # The two in the middle are left-overs of GPT-NeoX 20B: the class knows them by other names.
    keys.skip("classifier_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob")
    layer = Layer(
        placement="pre",
        residual="parallel" if keys.flag("use_parallel_residual", True) else "sequential",
        norm=norm,
        attention=attention(
            d, heads, bias=bias, positions=rotary, dropout=keys.real("attention_dropout", 0.0)
        ),
        feed_forward=two_layer(
            keys.integer("intermediate_size", 24_576), keys.activation("hidden_act", "gelu"), bias=True
        ),
        residual_dropout=keys.real("hidden_dropout", 0.0),
    )
    table = embedding(keys.integer("vocab_size"), d, dropout=layer.residual_dropout)
    head = decoder_head(keys, kind, tied=keys.flag("tie_word_embeddings", False))
    n = keys.integer("num_hidden_layers", 44)
    keys.done()
    return causal(d, table, n, layer, norm, head)


def write_gpt_neox(cfg: ModelConfig) -> dict[str, Any]:
    """GPT-NeoX."""
    layer = cfg.stack.layer
    rotary = layer.attention.positions
    assert isinstance(rotary, Rotary)
    written = write_rotary(rotary, share_key=True, head_width=layer.attention.head_width)
    share = written.pop("partial_rotary_factor")
    return {
        **written,
        **hidden(cfg),
        "rotary_pct": share,
        "rotary_emb_base": written["rope_theta"],
        "attention_bias": layer.attention.bias.query,
        "use_parallel_residual": layer.residual == "parallel",
        "layer_norm_eps": layer.norm.eps,
        "hidden_dropout": layer.residual_dropout,
        "tie_word_embeddings": is_tied(cfg),
    }


def map_gpt_neox(cfg: ModelConfig) -> FamilyMapping:
    """GPT-NeoX fuses query, key and value head by head."""
    layer = (
        *(Module(name, "input_layernorm") for name in ("attention_norm", "attention.before")),
        *(Module(name, "post_attention_layernorm") for name in ("feed_forward_norm", "feed_forward.before")),
        Fused("attention.body", "attention.query_key_value", op.per_head),
        Fused("attention", "attention.query_key_value", op.per_head),
        *sublayers(
            (Module("output", "attention.dense"),),
            (Module("up", "mlp.dense_h_to_4h"), Module("down", "mlp.dense_4h_to_h")),
        ),
    )
    return FamilyMapping(
        entries=(
            Module("embedding", "gpt_neox.embed_in"),
            Layers("decoder", "gpt_neox.layers.{}.", layer),
            Module("decoder.final_norm", "gpt_neox.final_layer_norm"),
            Module("head.labels", "score"),
            Module("head", "embed_out"),
        ),
        ties=tied_head(cfg, "embed_out.weight", "gpt_neox.embed_in.weight"),
        ignored=(
            Ignored("gpt_neox.layers.*.attention.bias", "the causal triangle"),
            Ignored("gpt_neox.layers.*.attention.masked_bias", "the mask's constant"),
            Ignored("*rotary_emb.inv_freq", "rebuilt from the configuration"),
            *other_head(cfg, "embed_out.weight"),
        ),
        base="gpt_neox.",
        heads=("embed_out.", "score."),
    )


FAMILIES = (
    Family(
        "gpt_neox", classes("GPTNeoX"), read_gpt_neox, write_gpt_neox, map_gpt_neox, defaults=token_ids(0, 2)
    ),
)
