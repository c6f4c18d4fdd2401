"""Llama, Mistral, Mixtral, Qwen 2 and 3, OLMo 2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from isoform.checkpoints.entries import ExpertGroup, FamilyMapping
from isoform.checkpoints.families.family import Family, HeadKind, single, token_ids
from isoform.checkpoints.families.llama_like import (
    Defaults,
    Sizes,
    classes,
    gated,
    make_attention,
    make_decoder,
    mapped,
    read_sizes,
    rms,
    rotary_of,
    windowed,
    write_common,
    write_network,
)
from isoform.checkpoints.keys import Keys
from isoform.config import (
    Attention,
    Experts,
    Gated,
    ModelConfig,
    QKNorm,
    Variant,
)
from isoform.errors import ArtifactError


def read_llama(keys: Keys, kind: HeadKind) -> ModelConfig:
    """Llama 1 to 3, SmolLM."""
    defaults = Defaults()
    sizes = read_sizes(keys, defaults)
    bias = keys.flag("attention_bias", False)
    # pretraining_tp splits the same products into slices; the function is the same.
    attention = make_attention(keys, sizes, rotary_of(keys, sizes, defaults), qkv_bias=bias, output_bias=bias)
    network = gated(keys, "silu", bias=keys.flag("mlp_bias", False))
    keys.must("rope_interleaved", False)
    keys.skip("max_sequence_length", "is_llama_config")
    return make_decoder(keys, kind, sizes, attention, network, rms(sizes.eps))


def read_mistral(keys: Keys, kind: HeadKind) -> ModelConfig:
    """Mistral."""
    defaults = Defaults(max_positions=131_072, kv_heads=8)
    sizes = read_sizes(keys, defaults)
    window = keys.take("sliding_window", 4096)
    attention = make_attention(keys, sizes, rotary_of(keys, sizes, defaults), window=window)
    return make_decoder(keys, kind, sizes, attention, gated(keys, "silu"), rms(sizes.eps))


def read_mixtral(keys: Keys, kind: HeadKind) -> ModelConfig:
    """Mixtral."""
    defaults = Defaults(theta=1e6, max_positions=131_072, kv_heads=8, eps=1e-5)
    sizes = read_sizes(keys, defaults)
    window = keys.take("sliding_window", None)
    attention = make_attention(keys, sizes, rotary_of(keys, sizes, defaults), window=window)
    keys.skip("output_router_logits")
    keys.must("router_jitter_noise", 0.0)
    network = Experts(
        n_experts=keys.integer("num_local_experts", 8),
        top_k=keys.integer("num_experts_per_tok", 2),
        expert=gated(keys, "silu"),
        router_bias=False,
        router_order="softmax_then_top_k_renormalised",
        load_balance=keys.real("router_aux_loss_coef", 0.001),
    )
    return make_decoder(keys, kind, sizes, attention, network, rms(sizes.eps))


def _qwen_windows(keys: Keys, sizes: Sizes, full: Attention) -> tuple[Attention, tuple[Variant, ...]]:
    window = keys.take("sliding_window", 4096) if keys.flag("use_sliding_window", False) else None
    keys.skip("sliding_window")
    first = keys.integer("max_window_layers", 28)
    types = keys.take("layer_types", None)
    if types is None:
        layers = [i for i in range(sizes.layers) if window is not None and i >= first]
    else:
        layers = [i for i, name in enumerate(types) if name == "sliding_attention"]
    if window is None or not layers:
        return full, ()
    return windowed(layers, full, full.replace(window=window), sizes.layers)


def read_qwen2(keys: Keys, kind: HeadKind) -> ModelConfig:
    """Qwen 2 and 2.5."""
    keys.must("use_mrope", False)
    defaults = Defaults(max_positions=32_768, kv_heads=32)
    sizes = read_sizes(keys, defaults)
    full = make_attention(keys, sizes, rotary_of(keys, sizes, defaults), qkv_bias=True)
    attention, variants = _qwen_windows(keys, sizes, full)
    return make_decoder(keys, kind, sizes, attention, gated(keys, "silu"), rms(sizes.eps), variants=variants)


def _qwen3_attention(keys: Keys, sizes: Sizes, defaults: Defaults) -> Attention:
    bias = keys.flag("attention_bias", False)
    norm = QKNorm(norm=rms(sizes.eps), axis="head", order="before_rotation")
    rotary = rotary_of(keys, sizes, defaults)
    return make_attention(keys, sizes, rotary, qkv_bias=bias, output_bias=bias, qk_norm=norm)


def read_qwen3(keys: Keys, kind: HeadKind) -> ModelConfig:
    """Qwen 3."""
    defaults = Defaults(max_positions=32_768, kv_heads=32, head_dim=128)
    sizes = read_sizes(keys, defaults)
    attention, variants = _qwen_windows(keys, sizes, _qwen3_attention(keys, sizes, defaults))
    return make_decoder(keys, kind, sizes, attention, gated(keys, "silu"), rms(sizes.eps), variants=variants)


def read_qwen3_moe(keys: Keys, kind: HeadKind) -> ModelConfig:
    """Qwen 3 with experts in all layers, or in every n-th."""
    defaults = Defaults(max_positions=32_768, kv_heads=4)
    sizes = read_sizes(keys, defaults)
    attention = _qwen3_attention(keys, sizes, defaults)
    if keys.flag("use_sliding_window", False):
        attention = attention.replace(window=keys.take("sliding_window", 4096))
    keys.skip("output_router_logits", "sliding_window", "max_window_layers")
    dense = gated(keys, "silu")
    renormalised = keys.flag("norm_topk_prob", False)
    # The second name is the one of version 5.
    n_experts = keys.integer("num_experts", keys.take("num_local_experts", 128))
    keys.must("num_local_experts", n_experts)
    experts = Experts(
        n_experts=max(n_experts, 1),
        top_k=keys.integer("num_experts_per_tok", 8),
        expert=dense.replace(width=keys.integer("moe_intermediate_size", 768)),
        router_bias=False,
        router_order="softmax_then_top_k_renormalised" if renormalised else "softmax_then_top_k",
        load_balance=keys.real("router_aux_loss_coef", 0.001),
    )
    step = keys.integer("decoder_sparse_step", 1)
    only = set(keys.take("mlp_only_layers", None) or [])
    plain = [i for i in range(sizes.layers) if i in only or n_experts == 0 or (i + 1) % step]
    variants = (Variant(layers=tuple(plain), feed_forward=dense),) if plain else ()
    return make_decoder(keys, kind, sizes, attention, experts, rms(sizes.eps), variants=variants)


def read_olmo2(keys: Keys, kind: HeadKind) -> ModelConfig:
    """OLMo 2."""
    defaults = Defaults(eps=1e-5)
    sizes = read_sizes(keys, defaults)
    norm = rms(sizes.eps, after_cast=True)
    bias = keys.flag("attention_bias", False)
    qk_norm = QKNorm(norm=norm, axis="projection", order="before_rotation")
    rotary = rotary_of(keys, sizes, defaults)
    attention = make_attention(keys, sizes, rotary, qkv_bias=bias, output_bias=bias, qk_norm=qk_norm)
    return make_decoder(keys, kind, sizes, attention, gated(keys, "silu"), norm, placement="res_post")


# --- writing ----------------------------------------------------------------------------------------------


def write_llama(cfg: ModelConfig) -> dict[str, Any]:
    """Llama."""
    layer = cfg.stack.layer
    assert isinstance(layer.feed_forward, Gated)
    return {
        **write_common(cfg),
        **write_network(layer.feed_forward),
        "attention_bias": layer.attention.bias.query,
        "mlp_bias": layer.feed_forward.bias_up,
    }


def write_mistral(cfg: ModelConfig) -> dict[str, Any]:
    """Mistral."""
    layer = cfg.stack.layer
    return {
        **write_common(cfg),
        **write_network(layer.feed_forward),
        "sliding_window": layer.attention.window,
    }


def write_mixtral(cfg: ModelConfig) -> dict[str, Any]:
    """Mixtral."""
    experts = cfg.stack.layer.feed_forward
    assert isinstance(experts, Experts)
    return {
        **write_common(cfg),
        **write_network(experts.expert),
        "sliding_window": cfg.stack.layer.attention.window,
        "num_local_experts": experts.n_experts,
        "num_experts_per_tok": experts.top_k,
        "router_aux_loss_coef": experts.load_balance,
    }


def _write_windows(cfg: ModelConfig) -> dict[str, Any]:
    windows = [layer.attention.window for layer in cfg.stack.layers()]
    sizes = {w for w in windows if w is not None}
    return {
        "use_sliding_window": bool(sizes),
        "sliding_window": single(sizes, "the window") if sizes else None,
        "max_window_layers": cfg.stack.n_layers,
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
    }


def write_qwen2(cfg: ModelConfig) -> dict[str, Any]:
    """Qwen 2."""
    return {**write_common(cfg), **write_network(cfg.stack.layer.feed_forward), **_write_windows(cfg)}


def write_qwen3(cfg: ModelConfig) -> dict[str, Any]:
    """Qwen 3."""
    return {**write_qwen2(cfg), "attention_bias": cfg.stack.layer.attention.bias.query}


def write_qwen3_moe(cfg: ModelConfig) -> dict[str, Any]:
    """Qwen 3 with experts."""
    experts, window = cfg.stack.layer.feed_forward, cfg.stack.layer.attention.window
    assert isinstance(experts, Experts)
    networks = [layer.feed_forward for layer in cfg.stack.layers()]
    dense = [i for i, network in enumerate(networks) if not isinstance(network, Experts)]
    return {
        **write_common(cfg),
        **write_network(networks[dense[0]] if dense else experts.expert),
        "attention_bias": cfg.stack.layer.attention.bias.query,
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
        "num_experts": experts.n_experts,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.expert.width,
        "norm_topk_prob": experts.router_order == "softmax_then_top_k_renormalised",
        "router_aux_loss_coef": experts.load_balance,
    }


def write_olmo2(cfg: ModelConfig) -> dict[str, Any]:
    """OLMo 2, whose class takes a table of ``type`` and ``factor`` alone."""
    common = write_common(cfg)
    scaling = common["rope_scaling"]
    if scaling is not None:
        if set(scaling) != {"rope_type", "factor"}:
            raise ArtifactError(f"cannot be written: rotary scaling of type {scaling['rope_type']}")
        common["rope_scaling"] = {"type": scaling["rope_type"], "factor": scaling["factor"]}
    return {
        **common,
        **write_network(cfg.stack.layer.feed_forward),
        "attention_bias": cfg.stack.layer.attention.bias.query,
    }


# --- tensors ----------------------------------------------------------------------------------------------


def _mixtral_mapping(cfg: ModelConfig) -> FamilyMapping:
    base = "block_sparse_moe."
    experts = ExpertGroup(
        "feed_forward.body", f"{base}gate", (f"{base}experts.{{}}.w1", f"{base}experts.{{}}.w3"),
        f"{base}experts.{{}}.w2",
    )  # fmt: skip
    return mapped(cfg, experts=experts)


def _qwen3_moe_mapping(cfg: ModelConfig) -> FamilyMapping:
    base = "mlp.experts.{}."
    experts = ExpertGroup(
        "feed_forward.body", "mlp.gate", (f"{base}gate_proj", f"{base}up_proj"), f"{base}down_proj"
    )
    return mapped(cfg, experts=experts)


def _olmo2_mapping(cfg: ModelConfig) -> FamilyMapping:
    norms = (
        ("attention.after_body", "post_attention_layernorm"),
        ("feed_forward.after_body", "post_feedforward_layernorm"),
    )
    return mapped(cfg, norms=norms)


def _family(
    model_type: str,
    name: str,
    read: Callable[[Keys, HeadKind], ModelConfig],
    write: Callable[[ModelConfig], dict[str, Any]],
    mapping: Callable[[ModelConfig], FamilyMapping] = mapped,
    ids: Mapping[str, Any] | None = None,
) -> Family:
    return Family(model_type, classes(name), read, write, mapping, bos=bool(ids), defaults=ids or {})


IDS = token_ids(1, 2)
FAMILIES = (
    _family("llama", "Llama", read_llama, write_llama, ids=IDS),
    _family("mistral", "Mistral", read_mistral, write_mistral, ids=IDS),
    _family("mixtral", "Mixtral", read_mixtral, write_mixtral, _mixtral_mapping, IDS),
    _family("qwen2", "Qwen2", read_qwen2, write_qwen2),
    _family("qwen3", "Qwen3", read_qwen3, write_qwen3),
    _family("qwen3_moe", "Qwen3Moe", read_qwen3_moe, write_qwen3_moe, _qwen3_moe_mapping),
    _family("olmo2", "Olmo2", read_olmo2, write_olmo2, _olmo2_mapping, token_ids(None, 50_279, 1)),
)
