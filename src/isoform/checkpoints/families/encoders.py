"""Encoders: BERT, RoBERTa, DistilBERT, ALBERT, ELECTRA, with the heads their classes have."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isoform.checkpoints.families.family import Family, HeadKind, labels
from isoform.checkpoints.keys import NAMES, Keys
from isoform.checkpoints.mapping import Entry, FamilyMapping, Ignored, Layers, Module, Packed, Same, Tied
from isoform.config import (
    ActivationName,
    Embedding,
    Head,
    Layer,
    Learned,
    ModelConfig,
    Norm,
    Pooler,
    PoolingHead,
    Projection,
    SequenceHead,
    Stack,
    TaggingHead,
    TokenHead,
    Transform,
    TwoLayer,
)
from isoform.config.presets.build import attention, layer_norm, two_layer

TANH = Pooler(activation="tanh", bias=True)


@dataclasses.dataclass(frozen=True)
class Kind:
    """What separates the families that share BERT's keys.

    Attributes:
        base: prefix of the bare model's tensors.
        head_activation: of the masked-token head; None: the feed-forward's.
        sequence: pooler of the sequence classifier; its tensors' prefix and whether dropout comes before it.
        narrow: whether the table may be narrower than the stream.
        offset: whether positions start behind the padding id.
    """

    base: str
    head_activation: ActivationName | None = None
    own_classifier: ActivationName | None = None
    narrow: bool = False
    offset: bool = False
    pooled: bool = True


BERT = Kind("bert.")
ROBERTA = Kind("roberta.", head_activation="gelu", own_classifier="tanh", offset=True)
ELECTRA = Kind("electra.", head_activation="gelu", own_classifier="gelu", narrow=True, pooled=False)
ALBERT = Kind("albert.", narrow=True)


def make_encoder(
    *,
    d: int,
    table: Embedding,
    n: int,
    layer: Layer,
    head: Head | None,
    sharing: tuple[int, ...] | None = None,
) -> ModelConfig:
    """A bidirectional stack without a final norm."""
    stack = Stack(n_layers=n, visibility="bidirectional", layer=layer, final_norm=None, layer_sharing=sharing)
    return ModelConfig(d_model=d, embedding=table, encoder=stack, head=head)


def post_norm(
    d: int, heads: int, width: int, act: ActivationName, norm: Norm, drop: float, on_weights: float
) -> Layer:
    """BERT's layer."""
    return Layer(
        placement="post",
        residual="sequential",
        norm=norm,
        attention=attention(d, heads, bias=True, dropout=on_weights),
        feed_forward=two_layer(width, act, bias=True),
        residual_dropout=drop,
    )


def make_head(
    keys: Keys, kind: HeadKind, family: Kind, act: ActivationName, norm: Norm, drop: float
) -> Head | None:
    """The head of one of the classes."""
    if kind == "tokens":
        dense = Transform(activation=family.head_activation or act, bias=True, norm=norm)
        return TokenHead(tied=keys.flag("tie_word_embeddings", True), bias=True, transform=dense)
    if kind == "pooled":
        return PoolingHead(pooling="first", pooler=TANH, normalise=False)
    if kind == "replaced":
        return TaggingHead(n_labels=1, dense=Pooler(activation=act, bias=True), bias=True)
    name = "classifier_dropout_prob" if family is ALBERT else "classifier_dropout"
    default = 0.1 if family is ALBERT else None
    given = keys.take(name, default)
    rate = drop if given is None else float(given)
    if kind == "tagging":
        return TaggingHead(n_labels=keys.n_labels(), bias=True, dropout=drop if family is ALBERT else rate)
    if kind == "sequence":
        own = family.own_classifier
        return SequenceHead(
            n_labels=keys.n_labels(), pooling="first", bias=True, dropout=rate,
            pooler=TANH if own is None else Pooler(activation=own, bias=True),
            input_dropout=0.0 if own is None else rate,
        )  # fmt: skip
    return None


def _reader(family: Kind) -> Callable[[Keys, HeadKind], ModelConfig]:
    def read(keys: Keys, kind: HeadKind) -> ModelConfig:
        d = keys.integer("hidden_size", 256 if family is ELECTRA else 768)
        act = keys.activation("hidden_act", "gelu")
        norm = layer_norm(keys.real("layer_norm_eps", 1e-12))
        drop = keys.real("hidden_dropout_prob", 0.1)
        keys.must("position_embedding_type", "absolute", None)
        keys.must("is_decoder", False)
        keys.skip("classifier_dropout", "gradient_checkpointing", "tie_word_embeddings", "directionality")
        keys.skip("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_type")
        keys.skip("pooler_size_per_head", "summary_type", "summary_use_proj", "summary_activation")
        keys.skip("summary_last_dropout")
        rows = keys.integer("max_position_embeddings", 512)
        offset = int(keys.data.get("pad_token_id", 1)) + 1 if family.offset else 0
        width = keys.integer("embedding_size", 128) if family.narrow else d
        table = Embedding(
            vocabulary="shared",
            vocab_size=keys.integer("vocab_size"),
            width=width,
            projection=Projection(place="after_norm", bias=True) if width != d else None,
            positions=Learned(max_positions=rows - offset, offset=offset),
            n_token_types=keys.integer("type_vocab_size", 2),
            norm=norm,
            dropout=drop,
        )
        layer = post_norm(
            d, keys.integer("num_attention_heads", 4 if family is ELECTRA else 12),
            keys.integer("intermediate_size", 1024 if family is ELECTRA else 3072), act, norm, drop,
            keys.real("attention_probs_dropout_prob", 0.1),
        )  # fmt: skip
        head = make_head(keys, kind, family, act, norm, drop)
        n = keys.integer("num_hidden_layers", 12)
        keys.done()
        return make_encoder(d=d, table=table, n=n, layer=layer, head=head)

    return read


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


# --- writing ----------------------------------------------------------------------------------------------


def write_encoder(cfg: ModelConfig) -> dict[str, Any]:
    """BERT, RoBERTa and ELECTRA."""
    assert cfg.encoder is not None
    layer, positions, network = cfg.encoder.layer, cfg.embedding.positions, cfg.encoder.layer.feed_forward
    assert isinstance(positions, Learned)
    assert isinstance(network, TwoLayer)
    head = cfg.head
    result: dict[str, Any] = {
        "vocab_size": cfg.embedding.vocab_size,
        "hidden_size": cfg.d_model,
        "num_hidden_layers": cfg.encoder.n_layers,
        "num_attention_heads": layer.attention.n_heads,
        "intermediate_size": network.width,
        "hidden_act": NAMES[network.activation],
        "hidden_dropout_prob": layer.residual_dropout,
        "attention_probs_dropout_prob": layer.attention.dropout,
        "max_position_embeddings": positions.max_positions + positions.offset,
        "type_vocab_size": cfg.embedding.n_token_types,
        "layer_norm_eps": layer.norm.eps,
        "tie_word_embeddings": not isinstance(head, TokenHead) or head.tied,
        **labels(head),
    }
    if isinstance(head, SequenceHead | TaggingHead):
        result["classifier_dropout"] = head.dropout
    if positions.offset:
        result["pad_token_id"] = positions.offset - 1
    return result


def write_electra(cfg: ModelConfig) -> dict[str, Any]:
    """ELECTRA."""
    return {**write_encoder(cfg), "embedding_size": cfg.embedding.width}


def write_albert(cfg: ModelConfig) -> dict[str, Any]:
    """ALBERT."""
    assert cfg.encoder is not None
    result = write_electra(cfg)
    rate = result.pop("classifier_dropout", None)
    if rate is not None:
        result["classifier_dropout_prob"] = rate
    owners = {cfg.encoder.owner(i) for i in range(cfg.encoder.n_layers)}
    return {**result, "num_hidden_groups": len(owners)}


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


# --- tensors ----------------------------------------------------------------------------------------------


def _tables(base: str) -> tuple[Entry, ...]:
    return (
        Module("embedding", f"{base}embeddings.word_embeddings"),
        Module("embedding.positions", f"{base}embeddings.position_embeddings"),
        Same("embedding.token_types", f"{base}embeddings.token_type_embeddings.weight"),
        Module("embedding.norm", f"{base}embeddings.LayerNorm"),
    )


def _counted(stored: Tensor) -> str | None:
    counted = torch.arange(stored.numel())
    return None if torch.equal(stored.reshape(-1).long(), counted) else "not 0, 1, 2 …"


def _buffers(base: str) -> tuple[Ignored, ...]:
    return (
        Ignored(f"{base}embeddings.position_ids", "0, 1, 2 …", _counted),
        Ignored(f"{base}embeddings.token_type_ids", "zeros"),
    )


def _others(cfg: ModelConfig, groups: dict[str, tuple[str, ...]], base: str) -> tuple[Ignored, ...]:
    """Tensors of heads that the class read here does not have, as published checkpoints often hold them."""
    kind = {TokenHead: "tokens", SequenceHead: "sequence", TaggingHead: "tagging", PoolingHead: "pooled"}
    mine = "states" if cfg.head is None else kind[type(cfg.head)]
    unused = [pattern for head, patterns in groups.items() if head != mine for pattern in patterns]
    keeps_pooler = mine == "pooled" or (mine == "sequence" and base in ("bert.", "albert."))
    if not keeps_pooler:
        unused.append(f"{base}pooler.*")
    return tuple(Ignored(pattern, "of another head") for pattern in unused)


BERT_LAYER = (
    Packed(
        "attention.body.qkv",
        (("query", "attention.self.query"), ("key", "attention.self.key"), ("value", "attention.self.value")),
    ),
    Module("attention.body.output", "attention.output.dense"),
    Module("attention.after_sum", "attention.output.LayerNorm"),
    Module("feed_forward.body.up", "intermediate.dense"),
    Module("feed_forward.body.down", "output.dense"),
    Module("feed_forward.after_sum", "output.LayerNorm"),
)


def _vocabulary_head(dense: str, norm: str, decoder: str, bias: str) -> tuple[Entry, ...]:
    return (
        Module("head.transform.dense", dense),
        Module("head.transform.norm", norm),
        Same("head.weight", f"{decoder}.weight"),
        Same("head.bias", bias),
    )


def _ties(cfg: ModelConfig, base: str, decoder: str, bias: str | None = None) -> tuple[Tied, ...]:
    result: list[Tied] = []
    if isinstance(cfg.head, TokenHead):
        if cfg.head.tied:
            result.append(Tied(f"{decoder}.weight", f"{base}embeddings.word_embeddings.weight"))
        if bias is not None:
            result.append(Tied(f"{decoder}.bias", bias, written=not cfg.head.tied))
    return tuple(result)


def map_bert(cfg: ModelConfig) -> FamilyMapping:
    """BERT."""
    head = "cls.predictions."
    return FamilyMapping(
        entries=(
            *_tables("bert."),
            Layers("encoder", "bert.encoder.layer.{}.", BERT_LAYER),
            *_vocabulary_head(
                f"{head}transform.dense", f"{head}transform.LayerNorm", f"{head}decoder", f"{head}bias"
            ),
            Module("head.pooler.dense", "bert.pooler.dense"),
            Module("head.labels", "classifier"),
        ),
        ties=_ties(cfg, "bert.", f"{head}decoder", f"{head}bias"),
        ignored=(
            *_buffers("bert."),
            Ignored("cls.seq_relationship.*", "the next-sentence head"),
            *_others(cfg, {"tokens": ("cls.predictions.*",)}, "bert."),
        ),
        base="bert.",
        heads=("cls.", "classifier."),
    )


def map_roberta(cfg: ModelConfig) -> FamilyMapping:
    """RoBERTa; its sequence classifier has a dense layer of its own."""
    own = isinstance(cfg.head, SequenceHead)
    return FamilyMapping(
        entries=(
            *_tables("roberta."),
            Layers("encoder", "roberta.encoder.layer.{}.", BERT_LAYER),
            *_vocabulary_head("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias"),
            Module("head.pooler.dense", "classifier.dense" if own else "roberta.pooler.dense"),
            Module("head.labels", "classifier.out_proj" if own else "classifier"),
        ),
        ties=_ties(cfg, "roberta.", "lm_head.decoder", "lm_head.bias"),
        ignored=(*_buffers("roberta."), *_others(cfg, {"tokens": ("lm_head.*",)}, "roberta.")),
        base="roberta.",
        heads=("lm_head.", "classifier."),
    )


def map_electra(cfg: ModelConfig) -> FamilyMapping:
    """ELECTRA: the generator's head, the discriminator's, a classifier."""
    own = isinstance(cfg.head, SequenceHead)
    found = isinstance(cfg.head, TaggingHead) and cfg.head.dense is not None
    head = "discriminator_predictions."
    labelled = f"{head}dense_prediction" if found else "classifier.out_proj" if own else "classifier"
    others = {
        "tokens": ("generator_predictions.*", "generator_lm_head.*"),
        "tagging": (f"{head}*",),
    }
    return FamilyMapping(
        entries=(
            *_tables("electra."),
            Module("embedding.projection", "electra.embeddings_project"),
            Layers("encoder", "electra.encoder.layer.{}.", BERT_LAYER),
            *_vocabulary_head(
                "generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head",
                "generator_lm_head.bias",
            ),
            Module("head.dense.dense", f"{head}dense"),
            Module("head.pooler.dense", "classifier.dense"),
            Module("head.labels", labelled),
        ),
        ties=_ties(cfg, "electra.", "generator_lm_head"),
        ignored=(*_buffers("electra."), *_others(cfg, others, "electra.")),
        base="electra.",
        heads=("generator_", "discriminator_", "classifier."),
    )  # fmt: skip


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
            *_tables("albert."),
            Module("embedding.projection", "albert.encoder.embedding_hidden_mapping_in"),
            Layers("encoder", "albert.encoder.albert_layer_groups.{}.albert_layers.0.", layer, owners.index),
            *_vocabulary_head(
                "predictions.dense", "predictions.LayerNorm", "predictions.decoder", "predictions.bias"
            ),
            Module("head.pooler.dense", "albert.pooler"),
            Module("head.labels", "classifier"),
        ),
        ties=_ties(cfg, "albert.", "predictions.decoder", "predictions.bias"),
        ignored=(
            *_buffers("albert."),
            Ignored("sop_classifier.*", "the sentence-order head"),
            *_others(cfg, {"tokens": ("predictions.*",)}, "albert."),
        ),
        base="albert.",
        heads=("predictions.", "classifier.", "sop_classifier."),
    )


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
            *_tables("distilbert."),
            Layers("encoder", "distilbert.transformer.layer.{}.", layer),
            *_vocabulary_head(
                "vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias"
            ),
            Module("head.pooler.dense", "pre_classifier"),
            Module("head.labels", "classifier"),
        ),
        ties=_ties(cfg, "distilbert.", "vocab_projector"),
        ignored=(
            *_buffers("distilbert."),
            *_others(cfg, {"tokens": ("vocab_*",)}, "distilbert."),
        ),
        base="distilbert.",
        heads=("vocab_", "pre_classifier.", "classifier."),
    )


def _classes(name: str, model: HeadKind) -> dict[str, HeadKind]:
    return {
        f"{name}ForMaskedLM": "tokens",
        f"{name}Model": model,
        f"{name}ForSequenceClassification": "sequence",
        f"{name}ForTokenClassification": "tagging",
    }


BERT_CLASSES: dict[str, HeadKind] = {**_classes("Bert", "pooled"), "BertForPreTraining": "tokens"}
ALBERT_CLASSES: dict[str, HeadKind] = {**_classes("Albert", "pooled"), "AlbertForPreTraining": "tokens"}
ELECTRA_CLASSES: dict[str, HeadKind] = {**_classes("Electra", "states"), "ElectraForPreTraining": "replaced"}
FAMILIES = (
    Family("bert", BERT_CLASSES, _reader(BERT), write_encoder, map_bert),
    Family("roberta", _classes("Roberta", "pooled"), _reader(ROBERTA), write_encoder, map_roberta),
    Family("xlm-roberta", _classes("XLMRoberta", "pooled"), _reader(ROBERTA), write_encoder, map_roberta),
    Family("distilbert", _classes("DistilBert", "states"), read_distilbert, write_distilbert, map_distilbert),
    Family("albert", ALBERT_CLASSES, read_albert, write_albert, map_albert),
    Family("electra", ELECTRA_CLASSES, _reader(ELECTRA), write_electra, map_electra),
)
