"""Gemma 1, 2 and 3 (text): scaled embeddings, norms by 1 + w, sandwiches, caps, windows on some layers."""

from __future__ import annotations

import struct
from typing import Any, Literal

from isoform.checkpoints.entries import FamilyMapping
from isoform.checkpoints.families.family import Family, HeadKind, single, token_ids
from isoform.checkpoints.families.llama_like import (
    Defaults,
    Sizes,
    classes,
    make_attention,
    make_decoder,
    mapped,
    read_sizes,
    rms,
    rotary_of,
    windowed,
    write_common,
)
from isoform.checkpoints.families.rotary import make_rotary, with_original, write_original, write_scaling
from isoform.checkpoints.keys import NAMES, Keys
from isoform.config import Attention, Gated, ModelConfig, QKNorm, Rotary, TokenHead

SANDWICH = (
    ("attention.before", "input_layernorm"),
    ("attention.after_body", "post_attention_layernorm"),
    ("feed_forward.before", "pre_feedforward_layernorm"),
    ("feed_forward.after_body", "post_feedforward_layernorm"),
)


def _gated(keys: Keys, name: str) -> Gated:
    return Gated(
        width=keys.integer("intermediate_size"),
        activation=keys.activation(name, "gelu_pytorch_tanh"),
        bias_gate=False,
        bias_up=False,
        bias_down=False,
    )


def read_gemma(keys: Keys, kind: HeadKind) -> ModelConfig:
    """Gemma 1. Its class reads ``hidden_act``, not ``hidden_activation``, a key of its successors."""
    defaults = Defaults(max_positions=8192, kv_heads=16, head_dim=256, tied=True)
    sizes = read_sizes(keys, defaults)
    bias = keys.flag("attention_bias", False)
    attention = make_attention(keys, sizes, rotary_of(keys, sizes, defaults), qkv_bias=bias, output_bias=bias)
    network = _gated(keys, "hidden_act")
    keys.skip("hidden_activation")
    keys.must("use_bidirectional_attention", False, None)
    norm = rms(sizes.eps, gemma=True)
    return make_decoder(keys, kind, sizes, attention, network, norm, scale="sqrt_d_model")


def _sliding(keys: Keys, sizes: Sizes, every: int) -> list[int]:
    types = keys.take("layer_types", None)
    if types is not None:
        return [i for i, name in enumerate(types) if name == "sliding_attention"]
    return [i for i in range(sizes.layers) if (i + 1) % every]


def read_gemma2(keys: Keys, kind: HeadKind) -> ModelConfig:
    """Gemma 2."""
    defaults = Defaults(max_positions=8192, kv_heads=4, head_dim=256, tied=True)
    sizes = read_sizes(keys, defaults)
    bias = keys.flag("attention_bias", False)
    full = make_attention(
        keys,
        sizes,
        rotary_of(keys, sizes, defaults),
        qkv_bias=bias,
        output_bias=bias,
        scale=keys.real("query_pre_attn_scalar", 256) ** -0.5,
        softcap=keys.take("attn_logit_softcapping", 50.0),
    )
    local = full.replace(window=keys.integer("sliding_window", 4096))
    attention, variants = windowed(_sliding(keys, sizes, 2), full, local, sizes.layers)
    keys.must("use_bidirectional_attention", False, None)
    keys.skip("cache_implementation", "hidden_act")
    cap = keys.take("final_logit_softcapping", 30.0)
    network = _gated(keys, "hidden_activation")
    return make_decoder(
        keys, kind, sizes, attention, network, rms(sizes.eps, gemma=True), placement="sandwich",
        scale="sqrt_d_model", softcap=cap, variants=variants,
    )  # fmt: skip


def read_gemma3(keys: Keys, kind: HeadKind) -> ModelConfig:
    """Gemma 3, the text model. Windowed layers have a rotary base of their own and no scaling."""
    defaults = Defaults(max_positions=131_072, kv_heads=4, head_dim=256, tied=True)
    sizes = read_sizes(keys, defaults)
    bias = keys.flag("attention_bias", False)
    everywhere, near = _gemma3_rotaries(keys, sizes)
    norm = rms(sizes.eps, gemma=True)
    full = make_attention(
        keys,
        sizes,
        everywhere,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=QKNorm(norm=norm, axis="head", order="before_rotation"),
        scale=keys.real("query_pre_attn_scalar", 256) ** -0.5,
    )
    local = full.replace(positions=near, window=keys.integer("sliding_window", 4096))
    every = keys.take("sliding_window_pattern", None) or keys.take("_sliding_window_pattern", 6)
    # The class keeps the cap of its predecessor as a key, and applies it to the last scores alone.
    keys.skip("_sliding_window_pattern", "cache_implementation", "attn_logit_softcapping")
    attention, variants = windowed(_sliding(keys, sizes, every), full, local, sizes.layers)
    keys.must("use_bidirectional_attention", False)
    return make_decoder(
        keys, kind, sizes, attention, _gated(keys, "hidden_activation"), norm, placement="sandwich",
        scale=_float32_root(sizes.d), softcap=keys.take("final_logit_softcapping", None), variants=variants,
    )  # fmt: skip


def _gemma3_rotaries(keys: Keys, sizes: Sizes) -> tuple[Rotary, Rotary]:
    length = keys.integer("max_position_embeddings", 131_072)
    theta, near = keys.real("rope_theta", 1_000_000.0), keys.real("rope_local_base_freq", 10_000.0)
    table = keys.take("rope_scaling", None)
    by_type = keys.take("rope_parameters", None)
    if by_type is not None:
        full = dict(by_type["full_attention"])
        theta = float(full.pop("rope_theta", theta))
        near = float(by_type["sliding_attention"].get("rope_theta", near))
        table = full
    table = with_original(keys, table, length, modern=by_type is not None)
    return (
        make_rotary(table, width=sizes.width, theta=theta, length=length, where=keys.where),
        make_rotary(None, width=sizes.width, theta=near, length=length, where=keys.where),
    )


def _float32_root(d: int) -> float | Literal["sqrt_d_model"]:
    """The factor as its classes keep it: √d rounded to float32, also in a wider network."""
    rounded = struct.unpack("f", struct.pack("f", d**0.5))[0]
    return "sqrt_d_model" if rounded == d**0.5 else rounded


def write_gemma(cfg: ModelConfig) -> dict[str, Any]:
    """Gemma 1."""
    network = cfg.stack.layer.feed_forward
    assert isinstance(network, Gated)
    name = NAMES[network.activation]
    return {
        **write_common(cfg),
        "intermediate_size": network.width,
        "hidden_act": name,
        "attention_bias": cfg.stack.layer.attention.bias.query,
    }


def write_gemma2(cfg: ModelConfig) -> dict[str, Any]:
    """Gemma 2."""
    attention = cfg.stack.layer.attention
    windows = [layer.attention.window for layer in cfg.stack.layers()]
    sizes = {w for w in windows if w is not None}
    result = write_gemma(cfg)
    result["hidden_activation"] = result.pop("hidden_act")
    return {
        **result,
        "query_pre_attn_scalar": _query_scalar(attention),
        "attn_logit_softcapping": attention.softcap,
        "final_logit_softcapping": cfg.head.softcap if isinstance(cfg.head, TokenHead) else None,
        "sliding_window": single(sizes, "the window") if sizes else 4096,
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
    }


def _query_scalar(attention: Attention) -> float:
    """The number whose inverse root is exactly the scale."""
    value = attention.score_scale**-2
    return round(value) if round(value) ** -0.5 == attention.score_scale else value


def write_gemma3(cfg: ModelConfig) -> dict[str, Any]:
    """Gemma 3."""
    layers = [layer.attention for layer in cfg.stack.layers()]
    full = [a.positions for a in layers if a.window is None] or [layers[0].positions]
    near = [a.positions for a in layers if a.window is not None] or [layers[0].positions]
    assert isinstance(full[0], Rotary)
    assert isinstance(near[0], Rotary)
    return {
        **write_gemma2(cfg),
        "rope_theta": full[0].theta,
        "rope_scaling": write_scaling(full[0].scaling),
        **write_original(full[0].scaling),
        "rope_local_base_freq": near[0].theta,
    }


def _map_sandwich(cfg: ModelConfig) -> FamilyMapping:
    return mapped(cfg, norms=SANDWICH)


GEMMA3: dict[str, HeadKind] = {"Gemma3ForCausalLM": "tokens", "Gemma3TextModel": "states"}
IDS = token_ids(2, 1, 0)
FAMILIES = (
    Family("gemma", classes("Gemma"), read_gemma, write_gemma, mapped, bos=True, defaults=IDS),
    Family("gemma2", classes("Gemma2"), read_gemma2, write_gemma2, _map_sandwich, bos=True, defaults=IDS),
    Family("gemma3_text", GEMMA3, read_gemma3, write_gemma3, _map_sandwich, bos=True, defaults=IDS),
)
