"""OPT: learned positions from 2, Pre-LN or Post-LN, sometimes a narrow table."""

from __future__ import annotations

from typing import Any, Literal

from isoform.checkpoints.entries import FamilyMapping, Layers, Module, Packed
from isoform.checkpoints.families.decoders import (
    causal,
    hidden,
    is_tied,
    other_head,
    tied_head,
)
from isoform.checkpoints.families.family import Family, HeadKind, decoder_head, token_ids
from isoform.checkpoints.families.llama_like import QKV, classes
from isoform.checkpoints.keys import NAMES, Keys
from isoform.config import (
    Layer,
    Learned,
    ModelConfig,
    Norm,
    Projection,
    TokenHead,
    Transform,
    TwoLayer,
)
from isoform.config.presets.build import attention, embedding, two_layer
from isoform.errors import ArtifactError


def read_opt(keys: Keys, kind: HeadKind) -> ModelConfig:
    """OPT."""
    d, heads = keys.integer("hidden_size", 768), keys.integer("num_attention_heads", 12)
    width = keys.take("word_embed_proj_dim", None) or d
    if width != d and kind != "tokens":
        raise ArtifactError(
            f"{keys.where}: a narrow table (word_embed_proj_dim) is read with its own head only"
        )
    affine = keys.flag("layer_norm_elementwise_affine", True)
    norm = Norm(kind="layer", eps=1e-5, gain=affine, bias=affine)
    before = keys.flag("do_layer_norm_before", True)
    placement: Literal["pre", "post"] = "pre" if before else "post"
    final = not keys.flag("_remove_final_layer_norm", False) and before
    bias = keys.flag("enable_bias", True)
    keys.skip("layerdrop", "activation_dropout")
    layer = Layer(
        placement=placement,
        residual="sequential",
        norm=norm,
        attention=attention(d, heads, bias=bias, dropout=keys.real("attention_dropout", 0.0)),
        feed_forward=two_layer(
            keys.integer("ffn_dim", 3072), keys.activation("activation_function", "relu"), bias=bias
        ),
        residual_dropout=keys.real("dropout", 0.1),
    )
    positions = Learned(max_positions=keys.integer("max_position_embeddings", 2048), offset=2)
    table = embedding(
        keys.integer("vocab_size", 50_272), width, positions,
        projection=Projection(place="before_positions", bias=False) if width != d else None,
    )  # fmt: skip
    head = decoder_head(keys, kind, tied=keys.flag("tie_word_embeddings", True))
    if isinstance(head, TokenHead) and width != d:
        head = head.replace(transform=Transform(activation="identity", bias=False, norm=None))
    n = keys.integer("num_hidden_layers", 12)
    keys.done()
    return causal(d, table, n, layer, norm if final else None, head)


def write_opt(cfg: ModelConfig) -> dict[str, Any]:
    """OPT."""
    layer, positions = cfg.stack.layer, cfg.embedding.positions
    assert isinstance(positions, Learned)
    assert isinstance(layer.feed_forward, TwoLayer)
    sizes = hidden(cfg)
    return {
        **{k: v for k, v in sizes.items() if k not in ("intermediate_size", "hidden_act")},
        "ffn_dim": layer.feed_forward.width,
        "activation_function": NAMES[layer.feed_forward.activation],
        "word_embed_proj_dim": cfg.embedding.width,
        "max_position_embeddings": positions.max_positions,
        "do_layer_norm_before": layer.placement == "pre",
        "_remove_final_layer_norm": layer.placement == "pre" and cfg.stack.final_norm is None,
        "layer_norm_elementwise_affine": layer.norm.gain,
        "enable_bias": layer.attention.bias.query,
        "dropout": layer.residual_dropout,
        "tie_word_embeddings": is_tied(cfg),
    }


def map_opt(cfg: ModelConfig) -> FamilyMapping:
    """OPT."""
    layer = (
        Packed("attention.body.qkv", QKV),
        Module("attention.body.output", "self_attn.out_proj"),
        *(Module(f"attention.{place}", "self_attn_layer_norm") for place in ("before", "after_sum")),
        *(Module(f"feed_forward.{place}", "final_layer_norm") for place in ("before", "after_sum")),
        Module("feed_forward.body.up", "fc1"),
        Module("feed_forward.body.down", "fc2"),
    )
    return FamilyMapping(
        entries=(
            Module("embedding", "model.decoder.embed_tokens"),
            Module("embedding.positions", "model.decoder.embed_positions"),
            Module("embedding.projection", "model.decoder.project_in"),
            Layers("decoder", "model.decoder.layers.{}.", layer),
            Module("decoder.final_norm", "model.decoder.final_layer_norm"),
            Module("head.transform.dense", "model.decoder.project_out"),
            Module("head.labels", "score"),
            Module("head", "lm_head"),
        ),
        ties=tied_head(cfg, "lm_head.weight", "model.decoder.embed_tokens.weight"),
        ignored=other_head(cfg, "lm_head.weight"),
        base="model.",
        heads=("lm_head.", "score."),
    )


FAMILIES = (
    Family("opt", classes("OPT"), read_opt, write_opt, map_opt, bos=True, defaults=token_ids(2, 2, 1)),
)
