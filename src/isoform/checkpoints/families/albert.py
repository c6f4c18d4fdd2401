"""ALBERT: a narrow table, and layers that share their parameters."""

from __future__ import annotations

from typing import Any

from isoform.checkpoints.entries import FamilyMapping, Ignored, Layers, Module, Packed
from isoform.checkpoints.families.encoders import (
    ALBERT,
    buffers,
    encoder_classes,
    make_encoder,
    make_head,
    others_of,
    post_norm,
    tables,
    ties_of,
    vocabulary_head,
    write_electra,
)
from isoform.checkpoints.families.family import Family, HeadKind
from isoform.checkpoints.keys import Keys
from isoform.config import (
    Embedding,
    Learned,
    ModelConfig,
    Projection,
)
from isoform.config.presets.build import layer_norm


def read_albert(keys: Keys, kind: HeadKind) -> ModelConfig:
    """ALBERT: groups of layers that share their parameters."""
    d = keys.integer("hidden_size", 4096)
    act = keys.activation("hidden_act", "gelu_new")
    norm = layer_norm(keys.real("layer_norm_eps", 1e-12))
    drop = keys.real("hidden_dropout_prob", 0.0)
    keys.must("position_embedding_type", "absolute", None)
    keys.must("inner_group_num", 1)
    keys.skip("classifier_dropout_prob", "down_scale_factor", "gap_size", "net_structure_type")
    keys.skip("num_memory_blocks", "tie_word_embeddings", "embedding_size")
    width = keys.integer("embedding_size", 128)
    table = Embedding(
        vocabulary="shared",
        vocab_size=keys.integer("vocab_size", 30_000),
        width=width,
        projection=Projection(place="after_norm", bias=True),
        positions=Learned(max_positions=keys.integer("max_position_embeddings", 512), offset=0),
        n_token_types=keys.integer("type_vocab_size", 2),
        norm=norm,
        dropout=drop,
    )
    layer = post_norm(
        d, keys.integer("num_attention_heads", 64), keys.integer("intermediate_size", 16_384), act, norm,
        drop, keys.real("attention_probs_dropout_prob", 0.0),
    ).replace(residual_dropout_on="attention")  # fmt: skip
    n, groups = keys.integer("num_hidden_layers", 12), keys.integer("num_hidden_groups", 1)
    of = [int(i / (n / groups)) for i in range(n)]
    head = make_head(keys, kind, ALBERT, act, norm, drop)
    keys.done()
    sharing = tuple(of.index(group) for group in of)
    return make_encoder(d=d, table=table, n=n, layer=layer, head=head, sharing=sharing)


def write_albert(cfg: ModelConfig) -> dict[str, Any]:
    """ALBERT."""
    assert cfg.encoder is not None
    result = write_electra(cfg)
    rate = result.pop("classifier_dropout", None)
    if rate is not None:
        result["classifier_dropout_prob"] = rate
    owners = {cfg.encoder.owner(i) for i in range(cfg.encoder.n_layers)}
    return {**result, "num_hidden_groups": len(owners)}


def map_albert(cfg: ModelConfig) -> FamilyMapping:
    """ALBERT; a layer here is the group that owns its parameters there."""
    stack = cfg.encoder
    assert stack is not None
    owners = sorted({stack.owner(i) for i in range(stack.n_layers)})
    layer = (
        Packed(
            "attention.body.qkv",
            (("query", "attention.query"), ("key", "attention.key"), ("value", "attention.value")),
        ),
        Module("attention.body.output", "attention.dense"),
        Module("attention.after_sum", "attention.LayerNorm"),
        Module("feed_forward.body.up", "ffn"),
        Module("feed_forward.body.down", "ffn_output"),
        Module("feed_forward.after_sum", "full_layer_layer_norm"),
    )
    return FamilyMapping(
        entries=(
            *tables("albert."),
            Module("embedding.projection", "albert.encoder.embedding_hidden_mapping_in"),
            Layers("encoder", "albert.encoder.albert_layer_groups.{}.albert_layers.0.", layer, owners.index),
            *vocabulary_head(
                "predictions.dense", "predictions.LayerNorm", "predictions.decoder", "predictions.bias"
            ),
            Module("head.pooler.dense", "albert.pooler"),
            Module("head.labels", "classifier"),
        ),
        ties=ties_of(cfg, "albert.", "predictions.decoder", "predictions.bias"),
        ignored=(
            *buffers("albert."),
            Ignored("sop_classifier.*", "the sentence-order head"),
            *others_of(cfg, {"tokens": ("predictions.*",)}, "albert."),
        ),
        base="albert.",
        heads=("predictions.", "classifier.", "sop_classifier."),
    )


CLASSES: dict[str, HeadKind] = {**encoder_classes("Albert", "pooled"), "AlbertForPreTraining": "tokens"}
FAMILIES = (Family("albert", CLASSES, read_albert, write_albert, map_albert),)
