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
from isoform.checkpoints.families.family import Family, HeadKind, token_ids
from isoform.checkpoints.keys import Keys
from isoform.config import (
    Embedding,
    Learned,
    ModelConfig,
    Projection,
    Stack,
)
from isoform.config.presets.build import layer_norm
from isoform.errors import ArtifactError


def read_albert(keys: Keys, kind: HeadKind) -> ModelConfig:
    """ALBERT: groups of layers that share their parameters."""
    d = keys.integer("hidden_size", 4096)
    act = keys.activation("hidden_act", "gelu_new")
    norm = layer_norm(keys.real("layer_norm_eps", 1e-12))
    drop = keys.real("hidden_dropout_prob", 0.0)
    keys.must("position_embedding_type", "absolute", None)
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
    inner = keys.integer("inner_group_num", 1)
    sharing = _sharing(n, groups, inner)
    if inner > 1 and n == groups:
        raise ArtifactError(
            f"{keys.where}: inner_group_num {inner} where no group is used twice is not supported"
        )
    head = make_head(keys, kind, ALBERT, act, norm, drop)
    keys.done()
    return make_encoder(d=d, table=table, n=len(sharing), layer=layer, head=head, sharing=sharing)


def _sharing(n: int, groups: int, inner: int) -> tuple[int, ...]:
    """Who owns each layer's parameters: n times a group, each of ``inner`` layers one after the other."""
    of = [int(i / (n / groups)) for i in range(n)]
    return tuple(of.index(group) * inner + j for group in of for j in range(inner))


def _groups(stack: Stack) -> tuple[int, int, int]:
    """Layers, groups and layers of a group there, the groups as small as can be.

    Raises:
        ArtifactError: the layers are not shared in groups.
    """
    owners = tuple(stack.owner(i) for i in range(stack.n_layers))
    n_owners = len(set(owners))
    for inner in range(1, n_owners + 1):
        n, groups = stack.n_layers // inner, n_owners // inner
        if _sharing(n, groups, inner) == owners:
            return n, groups, inner
    raise ArtifactError(f"cannot be written: layers {list(owners)} are not shared in groups")


def write_albert(cfg: ModelConfig) -> dict[str, Any]:
    """ALBERT."""
    assert cfg.encoder is not None
    result = write_electra(cfg)
    rate = result.pop("classifier_dropout", None)
    if rate is not None:
        result["classifier_dropout_prob"] = rate
    n, groups, inner = _groups(cfg.encoder)
    return {**result, "num_hidden_layers": n, "num_hidden_groups": groups, "inner_group_num": inner}


def map_albert(cfg: ModelConfig) -> FamilyMapping:
    """ALBERT; a layer's parameters are those of the group that owns it there."""
    stack = cfg.encoder
    assert stack is not None
    owners = sorted({stack.owner(i) for i in range(stack.n_layers)})
    _, _, inner = _groups(stack)

    def place(i: int) -> str:
        group, within = divmod(owners.index(i), inner)
        return f"{group}.albert_layers.{within}"

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
            Layers("encoder", "albert.encoder.albert_layer_groups.{}.", layer, place),
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
FAMILIES = (Family("albert", CLASSES, read_albert, write_albert, map_albert, defaults=token_ids(2, 3, 0)),)
