"""Encoders: BERT, RoBERTa, DistilBERT, ALBERT, ELECTRA, with the heads their classes have."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isoform.checkpoints.entries import Entry, FamilyMapping, Ignored, Layers, Module, Packed, Same, Tied
from isoform.checkpoints.families.family import Family, HeadKind, labels, token_ids
from isoform.checkpoints.keys import NAMES, Keys
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


# --- tensors ----------------------------------------------------------------------------------------------


def tables(base: str) -> tuple[Entry, ...]:
    return (
        Module("embedding", f"{base}embeddings.word_embeddings"),
        Module("embedding.positions", f"{base}embeddings.position_embeddings"),
        Same("embedding.token_types", f"{base}embeddings.token_type_embeddings.weight"),
        Module("embedding.norm", f"{base}embeddings.LayerNorm"),
    )


def _counted(stored: Tensor) -> str | None:
    counted = torch.arange(stored.numel())
    return None if torch.equal(stored.reshape(-1).long(), counted) else "not 0, 1, 2 …"


def buffers(base: str) -> tuple[Ignored, ...]:
    return (
        Ignored(f"{base}embeddings.position_ids", "0, 1, 2 …", _counted),
        Ignored(f"{base}embeddings.token_type_ids", "zeros"),
    )


def others_of(cfg: ModelConfig, groups: dict[str, tuple[str, ...]], base: str) -> tuple[Ignored, ...]:
    """Tensors of heads that the class read here does not have, as published checkpoints often hold them."""
    kind = {TokenHead: "tokens", SequenceHead: "sequence", TaggingHead: "tagging", PoolingHead: "pooled"}
    mine = "states" if cfg.head is None else kind[type(cfg.head)]
    unused = [pattern for head, patterns in groups.items() if head != mine for pattern in patterns]
    pooler = isinstance(cfg.head, PoolingHead) and cfg.head.pooler is not None
    keeps_pooler = pooler or (mine == "sequence" and base in ("bert.", "albert."))
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


def vocabulary_head(dense: str, norm: str, decoder: str, bias: str) -> tuple[Entry, ...]:
    return (
        Module("head.transform.dense", dense),
        Module("head.transform.norm", norm),
        Same("head.weight", f"{decoder}.weight"),
        Same("head.bias", bias),
    )


def ties_of(cfg: ModelConfig, base: str, decoder: str, bias: str | None = None) -> tuple[Tied, ...]:
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
            *tables("bert."),
            Layers("encoder", "bert.encoder.layer.{}.", BERT_LAYER),
            *vocabulary_head(
                f"{head}transform.dense", f"{head}transform.LayerNorm", f"{head}decoder", f"{head}bias"
            ),
            Module("head.pooler.dense", "bert.pooler.dense"),
            Module("head.labels", "classifier"),
        ),
        ties=ties_of(cfg, "bert.", f"{head}decoder", f"{head}bias"),
        ignored=(
            *buffers("bert."),
            Ignored("cls.seq_relationship.*", "the next-sentence head"),
            *others_of(cfg, {"tokens": ("cls.predictions.*",)}, "bert."),
        ),
        base="bert.",
        heads=("cls.", "classifier."),
    )


def map_roberta(cfg: ModelConfig) -> FamilyMapping:
    """RoBERTa; its sequence classifier has a dense layer of its own."""
    own = isinstance(cfg.head, SequenceHead)
    return FamilyMapping(
        entries=(
            *tables("roberta."),
            Layers("encoder", "roberta.encoder.layer.{}.", BERT_LAYER),
            *vocabulary_head("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias"),
            Module("head.pooler.dense", "classifier.dense" if own else "roberta.pooler.dense"),
            Module("head.labels", "classifier.out_proj" if own else "classifier"),
        ),
        ties=ties_of(cfg, "roberta.", "lm_head.decoder", "lm_head.bias"),
        ignored=(*buffers("roberta."), *others_of(cfg, {"tokens": ("lm_head.*",)}, "roberta.")),
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
            *tables("electra."),
            Module("embedding.projection", "electra.embeddings_project"),
            Layers("encoder", "electra.encoder.layer.{}.", BERT_LAYER),
            *vocabulary_head(
                "generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head",
                "generator_lm_head.bias",
            ),
            Module("head.dense.dense", f"{head}dense"),
            Module("head.pooler.dense", "classifier.dense"),
            Module("head.labels", labelled),
        ),
        ties=ties_of(cfg, "electra.", "generator_lm_head"),
        ignored=(*buffers("electra."), *others_of(cfg, others, "electra.")),
        base="electra.",
        heads=("generator_", "discriminator_", "classifier."),
    )  # fmt: skip


def encoder_classes(name: str, model: HeadKind) -> dict[str, HeadKind]:
    return {
        f"{name}ForMaskedLM": "tokens",
        f"{name}Model": model,
        f"{name}ForSequenceClassification": "sequence",
        f"{name}ForTokenClassification": "tagging",
    }


BERT_CLASSES: dict[str, HeadKind] = {**encoder_classes("Bert", "pooled"), "BertForPreTraining": "tokens"}
ELECTRA_CLASSES: dict[str, HeadKind] = {
    **encoder_classes("Electra", "states"),
    "ElectraForPreTraining": "replaced",
}
XLM_CLASSES = encoder_classes("XLMRoberta", "pooled")
IDS = token_ids(0, 2, 1)
FAMILIES = (
    Family("bert", BERT_CLASSES, _reader(BERT), write_encoder, map_bert),
    Family(
        "roberta",
        encoder_classes("Roberta", "pooled"),
        _reader(ROBERTA),
        write_encoder,
        map_roberta,
        defaults=IDS,
    ),
    Family("xlm-roberta", XLM_CLASSES, _reader(ROBERTA), write_encoder, map_roberta, defaults=IDS),
    Family("electra", ELECTRA_CLASSES, _reader(ELECTRA), write_electra, map_electra),
)
