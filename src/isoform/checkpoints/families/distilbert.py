"""DistilBERT: BERT with half the layers and no token types."""

from __future__ import annotations

from typing import Any

from isoform.checkpoints.entries import FamilyMapping, Layers, Module, Packed
from isoform.checkpoints.families.encoders import (
    buffers,
    encoder_classes,
    make_encoder,
    others_of,
    post_norm,
    tables,
    ties_of,
    vocabulary_head,
)
from isoform.checkpoints.families.family import Family, HeadKind, labels
from isoform.checkpoints.keys import NAMES, Keys
from isoform.config import (
    Embedding,
    Head,
    Learned,
    ModelConfig,
    Pooler,
    SequenceHead,
    TaggingHead,
    TokenHead,
    Transform,
    TwoLayer,
)
from isoform.config.presets.build import layer_norm


def read_distilbert(keys: Keys, kind: HeadKind) -> ModelConfig:
    """DistilBERT."""
    d = keys.integer("dim", 768)
    act = keys.activation("activation", "gelu")
    norm = layer_norm(1e-12)
    drop = keys.real("dropout", 0.1)
    keys.skip(
        "sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout", "tie_weights_", "tie_word_embeddings"
    )
    table = Embedding(
        vocabulary="shared",
        vocab_size=keys.integer("vocab_size"),
        width=d,
        positions=Learned(max_positions=keys.integer("max_position_embeddings", 512), offset=0),
        norm=norm,
        dropout=drop,
    )
    layer = post_norm(
        d, keys.integer("n_heads", 12), keys.integer("hidden_dim", 3072), act, norm, drop,
        keys.real("attention_dropout", 0.1),
    ).replace(residual_dropout_on="feed_forward")  # fmt: skip
    head: Head | None = None
    if kind == "tokens":
        dense = Transform(activation=act, bias=True, norm=norm)
        head = TokenHead(tied=keys.flag("tie_word_embeddings", True), bias=True, transform=dense)
    elif kind == "sequence":
        head = SequenceHead(
            n_labels=keys.n_labels(), pooling="first", pooler=Pooler(activation="relu", bias=True), bias=True,
            dropout=keys.real("seq_classif_dropout", 0.2),
        )  # fmt: skip
    elif kind == "tagging":
        head = TaggingHead(n_labels=keys.n_labels(), bias=True, dropout=drop)
    n = keys.integer("n_layers", 6)
    keys.done()
    return make_encoder(d=d, table=table, n=n, layer=layer, head=head)


def write_distilbert(cfg: ModelConfig) -> dict[str, Any]:
    """DistilBERT."""
    assert cfg.encoder is not None
    layer, positions, network = cfg.encoder.layer, cfg.embedding.positions, cfg.encoder.layer.feed_forward
    assert isinstance(positions, Learned)
    assert isinstance(network, TwoLayer)
    result: dict[str, Any] = {
        "vocab_size": cfg.embedding.vocab_size,
        "dim": cfg.d_model,
        "n_layers": cfg.encoder.n_layers,
        "n_heads": layer.attention.n_heads,
        "hidden_dim": network.width,
        "activation": NAMES[network.activation],
        "dropout": layer.residual_dropout,
        "attention_dropout": layer.attention.dropout,
        "max_position_embeddings": positions.max_positions,
        "tie_word_embeddings": not isinstance(cfg.head, TokenHead) or cfg.head.tied,
        **labels(cfg.head),
    }
    if isinstance(cfg.head, SequenceHead):
        result["seq_classif_dropout"] = cfg.head.dropout
    return result


def map_distilbert(cfg: ModelConfig) -> FamilyMapping:
    """DistilBERT."""
    layer = (
        Packed(
            "attention.body.qkv",
            (("query", "attention.q_lin"), ("key", "attention.k_lin"), ("value", "attention.v_lin")),
        ),
        Module("attention.body.output", "attention.out_lin"),
        Module("attention.after_sum", "sa_layer_norm"),
        Module("feed_forward.body.up", "ffn.lin1"),
        Module("feed_forward.body.down", "ffn.lin2"),
        Module("feed_forward.after_sum", "output_layer_norm"),
    )
    return FamilyMapping(
        entries=(
            *tables("distilbert."),
            Layers("encoder", "distilbert.transformer.layer.{}.", layer),
            *vocabulary_head(
                "vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias"
            ),
            Module("head.pooler.dense", "pre_classifier"),
            Module("head.labels", "classifier"),
        ),
        ties=ties_of(cfg, "distilbert.", "vocab_projector"),
        ignored=(
            *buffers("distilbert."),
            *others_of(cfg, {"tokens": ("vocab_*",)}, "distilbert."),
        ),
        base="distilbert.",
        heads=("vocab_", "pre_classifier.", "classifier."),
    )


CLASSES = encoder_classes("DistilBert", "states")
FAMILIES = (Family("distilbert", CLASSES, read_distilbert, write_distilbert, map_distilbert),)
