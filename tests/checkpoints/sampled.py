"""Configurations of every family drawn by a seed, over the fields of its configuration class."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

Settings = dict[str, Any]
ACTIVATIONS = [
    "silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "relu", "relu2", "quick_gelu", "tanh",
    "mish", "leaky_relu", "sigmoid",
]  # fmt: skip
VOCABULARY = 61
LONGEST = 17
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclasses.dataclass(frozen=True)
class Sample:
    """A class of the library, and what its configuration is made of."""

    config: str
    cls: str
    settings: Settings
    options: Settings = dataclasses.field(default_factory=dict[str, Any])
    """Arguments of the class beside the configuration."""


Draw = Callable[[random.Random], Sample]


# --- encoders ---------------------------------------------------------------------------------------------


def _encoder(r: random.Random) -> Settings:
    heads = r.choice([1, 2, 3, 4])
    return {
        "vocab_size": VOCABULARY, "hidden_size": heads * r.choice([3, 4, 8]),
        "intermediate_size": r.choice([8, 20, 33]), "num_hidden_layers": r.choice([1, 2, 3]),
        "num_attention_heads": heads, "hidden_act": r.choice(ACTIVATIONS),
        "max_position_embeddings": r.choice([LONGEST, 40]), "type_vocab_size": r.choice([1, 2, 3]),
        "layer_norm_eps": r.choice([1e-12, 1e-5, 1e-2]), "pad_token_id": 0, "num_labels": r.choice([1, 2, 5]),
        "tie_word_embeddings": r.choice([True, False]), "classifier_dropout": r.choice([None, 0.3]),
    }  # fmt: skip


HEADS = ["ForMaskedLM", "Model", "ForSequenceClassification", "ForTokenClassification"]


def _of(name: str, r: random.Random, settings: Settings, pooled: bool, *more: str) -> Sample:
    suffix = r.choice([*HEADS, *more])
    options = {"add_pooling_layer": False} if pooled and suffix == "Model" and r.random() < 0.3 else {}
    return Sample(f"{name}Config", f"{name}{suffix}", settings, options)


def _bert(r: random.Random) -> Sample:
    return _of("Bert", r, _encoder(r), True)


def _roberta(name: str) -> Draw:
    def draw(r: random.Random) -> Sample:
        pad = r.choice([0, 1, 2, 5])
        settings = {**_encoder(r), "pad_token_id": pad, "max_position_embeddings": LONGEST + pad + 1}
        return _of(name, r, settings, True)

    return draw


def _electra(r: random.Random) -> Sample:
    settings = _encoder(r)
    width = r.choice([settings["hidden_size"], 10, 7])
    return _of("Electra", r, {**settings, "embedding_size": width}, False, "ForPreTraining")


def _albert(r: random.Random) -> Sample:
    settings = _encoder(r)
    settings["classifier_dropout_prob"] = settings.pop("classifier_dropout") or 0.1
    layers = r.choice([1, 2, 3, 4])
    groups = r.randint(1, layers)
    return _of("Albert", r, {
        **settings, "num_hidden_layers": layers, "num_hidden_groups": groups,
        "inner_group_num": r.choice([1, 2]) if groups <= layers // 2 else 1,
        "embedding_size": r.choice([settings["hidden_size"], 10, 7]),
    }, True)  # fmt: skip


def _distilbert(r: random.Random) -> Sample:
    heads = r.choice([1, 2, 3])
    return _of("DistilBert", r, {
        "vocab_size": VOCABULARY, "dim": heads * r.choice([4, 8]), "hidden_dim": r.choice([8, 20]),
        "n_layers": r.choice([1, 2, 3]), "n_heads": heads, "max_position_embeddings": r.choice([LONGEST, 40]),
        "activation": r.choice(ACTIVATIONS), "sinusoidal_pos_embds": r.choice([True, False]),
        "pad_token_id": 0, "num_labels": r.choice([1, 2, 5]), "tie_word_embeddings": r.choice([True, False]),
    }, False)  # fmt: skip


# --- encoder–decoders -------------------------------------------------------------------------------------


def _fairseq(r: random.Random) -> Settings:
    d = r.choice([12, 24])
    return {
        "vocab_size": VOCABULARY, "d_model": d, "encoder_layers": r.choice([1, 2, 3]),
        "decoder_layers": r.choice([1, 2, 3]), "encoder_attention_heads": r.choice([1, 2, 3, 6]),
        "decoder_attention_heads": r.choice([1, 2, 3, 6]), "encoder_ffn_dim": r.choice([8, 20]),
        "decoder_ffn_dim": r.choice([8, 28]), "max_position_embeddings": r.choice([LONGEST, 40]),
        "activation_function": r.choice(ACTIVATIONS), "scale_embedding": r.choice([True, False]),
        "tie_word_embeddings": r.choice([True, False]), "decoder_start_token_id": r.choice([0, 1, 2]),
        "forced_bos_token_id": r.choice([None, 5]), "forced_eos_token_id": r.choice([None, 2]), **SPECIAL,
    }  # fmt: skip


def _bart(name: str, *classes: str) -> Draw:
    def draw(r: random.Random) -> Sample:
        return Sample(f"{name}Config", f"{name}{r.choice(classes)}", _fairseq(r))

    return draw


def _m2m100(r: random.Random) -> Sample:
    pad = r.choice([0, 1])
    # A start that is also the padding has no position there.
    settings = {**_fairseq(r), "pad_token_id": pad, "bos_token_id": 1 - pad, "decoder_start_token_id": 2}
    settings["suppress_tokens"] = [pad]  # nor has one that is chosen
    return Sample("M2M100Config", f"M2M100{r.choice(GENERATORS)}", settings)


def _marian(r: random.Random) -> Sample:
    settings = _fairseq(r)
    if r.random() < 0.5:
        settings |= {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": VOCABULARY}
    return Sample("MarianConfig", r.choice(["MarianMTModel", "MarianMTModel", "MarianModel"]), settings)


GENERATORS = ("ForConditionalGeneration", "ForConditionalGeneration", "Model")
PROJECTIONS = [
    "relu", "gelu", "gelu_new", "silu", "gated-gelu", "gated-silu", "gated-relu", "gated-gelu_new",
    "gated-tanh",
]  # fmt: skip


def _t5(name: str) -> Draw:
    def draw(r: random.Random) -> Sample:
        buckets = r.choice([4, 8, 10, 32])
        return Sample(f"{name}Config", f"{name}{r.choice(GENERATORS)}", {
            "vocab_size": VOCABULARY, "d_model": r.choice([12, 24]), "d_kv": r.choice([3, 5, 8]),
            "d_ff": r.choice([8, 20]), "num_layers": r.choice([1, 2, 3]),
            "num_decoder_layers": r.choice([None, 1, 2, 3]), "num_heads": r.choice([1, 3, 4]),
            "relative_attention_num_buckets": buckets,
            "relative_attention_max_distance": buckets * r.choice([1, 2]),
            "layer_norm_epsilon": r.choice([1e-6, 1e-2]), "feed_forward_proj": r.choice(PROJECTIONS),
            "tie_word_embeddings": r.choice([True, False]), "decoder_start_token_id": 0, "pad_token_id": 0,
            "eos_token_id": 2,
        })  # fmt: skip

    return draw


# --- decoders ---------------------------------------------------------------------------------------------


def _common(r: random.Random) -> Settings:
    heads = r.choice([1, 2, 4, 6])
    return {
        "vocab_size": VOCABULARY, "hidden_size": heads * r.choice([4, 8]),
        "intermediate_size": r.choice([12, 20]), "num_hidden_layers": r.choice([1, 2, 3]),
        "num_attention_heads": heads, "hidden_act": r.choice(ACTIVATIONS), "max_position_embeddings": 64,
        **SPECIAL, "tie_word_embeddings": r.choice([True, False]), "num_labels": r.choice([1, 3]),
    }  # fmt: skip


def _shared(r: random.Random, heads: int) -> int:
    return r.choice([n for n in range(1, heads + 1) if heads % n == 0])


def _grouped(r: random.Random) -> Settings:
    settings = _common(r)
    return {
        **settings, "num_key_value_heads": _shared(r, settings["num_attention_heads"]),
        "head_dim": r.choice([4, 6, 10]), "rms_norm_eps": r.choice([1e-6, 1e-5, 1e-2]),
        "rope_theta": r.choice([30.0, 1e4]),
    }  # fmt: skip


def _without(settings: Settings, *names: str) -> Settings:
    return {k: v for k, v in settings.items() if k not in names}


def _scaling(r: random.Random, half: int) -> Settings:
    kind = r.choice([None, None, "default", "linear", "llama3", "yarn", "longrope"])
    if kind is None:
        return {}
    table: Settings = {"rope_type": kind}
    if kind == "linear":
        table |= {"factor": r.choice([2.0, 3.5])}
    if kind == "llama3":
        table |= {
            "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": r.choice([2.0, 4.0]),
            "original_max_position_embeddings": 16,
        }  # fmt: skip
    if kind == "yarn":
        table |= {"factor": r.choice([2.0, 4.0]), "beta_fast": r.choice([3.0, 32.0])}
        table |= r.choice([{}, {"original_max_position_embeddings": 24}])
        table |= r.choice([{}, {"attention_factor": 1.3}, {"mscale": 0.7, "mscale_all_dim": 1.4}])
        table |= r.choice([{}, {"truncate": False}])
    if kind == "longrope":
        table |= {
            "factor": r.choice([1.0, 4.0]), "short_factor": [1.0 + 0.1 * i for i in range(half)],
            "long_factor": [2.0 + 0.5 * i for i in range(half)],
        }  # fmt: skip
        table |= r.choice([{}, {"attention_factor": 1.2}])
        own = r.choice([{}, {"original_max_position_embeddings": 32}])
        return {"rope_scaling": table, **own}
    return {"rope_scaling": table}


def _rotary(r: random.Random, settings: Settings, share: float = 1.0) -> Settings:
    width = settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
    return _scaling(r, int(width * share) // 2)


def _decoder(name: str, r: random.Random, settings: Settings, *more: str) -> Sample:
    classes = more or ("ForCausalLM", "ForCausalLM", "ForCausalLM", "Model", "ForSequenceClassification")
    return Sample(f"{name}Config", f"{name}{r.choice(classes)}", settings)


def _flag(r: random.Random) -> bool:
    return r.random() < 0.5


def _llama(r: random.Random) -> Sample:
    s = _grouped(r)
    return _decoder("Llama", r, {**s, **_rotary(r, s), "attention_bias": _flag(r), "mlp_bias": _flag(r)})


def _mistral(r: random.Random) -> Sample:
    s = _grouped(r)
    return _decoder("Mistral", r, {**s, **_rotary(r, s), "sliding_window": r.choice([None, 2, 3, 7])})


def _mixtral(r: random.Random) -> Sample:
    s, n = _grouped(r), r.choice([2, 3, 4])
    return _decoder("Mixtral", r, {
        **s, **_rotary(r, s), "sliding_window": r.choice([None, 5]), "num_local_experts": n,
        "num_experts_per_tok": r.randint(1, n),
    })  # fmt: skip


def _windows(r: random.Random, layers: int) -> Settings:
    if _flag(r):
        return {"use_sliding_window": False, "sliding_window": 3}
    window: Settings = {"use_sliding_window": True, "sliding_window": r.choice([2, 3, 6])}
    if _flag(r):
        types = ["full_attention", "sliding_attention"]
        return {**window, "layer_types": [r.choice(types) for _ in range(layers)]}
    return {**window, "max_window_layers": r.choice([0, 1, 2])}


def _qwen2(r: random.Random) -> Sample:
    s = _grouped(r) if _flag(r) else _without(_grouped(r), "head_dim")
    return _decoder("Qwen2", r, {**s, **_rotary(r, s), **_windows(r, s["num_hidden_layers"])})


def _qwen3(r: random.Random) -> Sample:
    s = _grouped(r)
    windows = _windows(r, s["num_hidden_layers"])
    return _decoder("Qwen3", r, {**s, **_rotary(r, s), **windows, "attention_bias": _flag(r)})


def _qwen3_moe(r: random.Random) -> Sample:
    s, n = _grouped(r), r.choice([2, 3, 5])
    only = [i for i in range(s["num_hidden_layers"]) if r.random() < 0.3]
    return _decoder("Qwen3Moe", r, {
        **s, **_rotary(r, s), "num_experts": n, "num_experts_per_tok": r.randint(1, n),
        "moe_intermediate_size": r.choice([6, 8]), "norm_topk_prob": _flag(r), "attention_bias": _flag(r),
        "decoder_sparse_step": r.choice([1, 2]), "mlp_only_layers": only, "use_sliding_window": _flag(r),
        "sliding_window": 4,
    })  # fmt: skip


def _olmo2(r: random.Random) -> Sample:
    s = _grouped(r) if _flag(r) else _without(_grouped(r), "head_dim")
    scaled = r.choice([{}, {"rope_scaling": {"type": "linear", "factor": 2.0}}])  # all that its class takes
    settings = {**s, **scaled, "attention_bias": _flag(r)}
    return _decoder("Olmo2", r, settings, "ForCausalLM", "ForCausalLM", "Model")


def _gemma(r: random.Random) -> Sample:
    s = _grouped(r)
    corrected = {"hidden_activation": r.choice([None, "gelu_pytorch_tanh", "gelu"])}
    return _decoder("Gemma", r, {**s, **_rotary(r, s), **corrected, "attention_bias": _flag(r)})


def _gemma2(r: random.Random) -> Sample:
    s = _grouped(r)
    s["hidden_activation"] = s.pop("hidden_act")
    types: Settings = {}
    if _flag(r):
        kinds = ["full_attention", "sliding_attention"]
        types = {"layer_types": [r.choice(kinds) for _ in range(s["num_hidden_layers"])]}
    return _decoder("Gemma2", r, {
        **s, **_rotary(r, s), **types, "sliding_window": r.choice([3, 8]),
        "query_pre_attn_scalar": r.choice([4, 11]), "attn_logit_softcapping": r.choice([None, 3.0]),
        "final_logit_softcapping": r.choice([None, 4.0]), "attention_bias": _flag(r),
    })  # fmt: skip


def _gemma3(r: random.Random) -> Sample:
    sample = _gemma2(r)
    s = {**sample.settings, "rope_local_base_freq": r.choice([20.0, 1e4])}
    if "layer_types" not in s:
        s["sliding_window_pattern"] = r.choice([1, 2, 3])
    return Sample("Gemma3TextConfig", r.choice(["Gemma3ForCausalLM", "Gemma3TextModel"]), s)


def _gpt_neox(r: random.Random) -> Sample:
    s = _common(r)
    return _decoder("GPTNeoX", r, {
        **s, **_rotary(r, s, 0.5), "rotary_pct": 0.5, "rotary_emb_base": r.choice([40, 10_000]),
        "use_parallel_residual": _flag(r), "attention_bias": _flag(r),
        "layer_norm_eps": r.choice([1e-5, 1e-2]),
    })  # fmt: skip


def _phi(r: random.Random) -> Sample:
    s, share = _common(r), r.choice([0.5, 1.0])
    return _decoder("Phi", r, {
        **s, **_rotary(r, s, share), "partial_rotary_factor": share, "qk_layernorm": _flag(r),
        "num_key_value_heads": _shared(r, s["num_attention_heads"]), "layer_norm_eps": r.choice([1e-5, 1e-2]),
        "rope_theta": r.choice([30.0, 1e4]),
    })  # fmt: skip


def _starcoder2(r: random.Random) -> Sample:
    s = _common(r)
    return _decoder("Starcoder2", r, {
        **s, **_rotary(r, s), "num_key_value_heads": _shared(r, s["num_attention_heads"]),
        "sliding_window": r.choice([None, 2, 4]), "use_bias": _flag(r),
        "norm_epsilon": r.choice([1e-5, 1e-2]), "rope_theta": r.choice([30.0, 1e4]),
    })  # fmt: skip


def _gpt2(r: random.Random) -> Sample:
    heads = r.choice([1, 2, 3, 6])
    return _decoder("GPT2", r, {
        "vocab_size": VOCABULARY, "n_embd": heads * r.choice([4, 6]), "n_layer": r.choice([1, 2, 3]),
        "n_head": heads, "n_positions": r.choice([25, 64]), "n_inner": r.choice([None, 20]),
        "activation_function": r.choice(ACTIVATIONS), "scale_attn_by_inverse_layer_idx": _flag(r),
        "scale_attn_weights": _flag(r), "tie_word_embeddings": _flag(r), **SPECIAL,
        "layer_norm_epsilon": r.choice([1e-5, 1e-2]), "num_labels": r.choice([1, 3]),
    }, "LMHeadModel", "LMHeadModel", "Model", "ForSequenceClassification")  # fmt: skip


def _bloom(r: random.Random) -> Sample:
    heads = r.choice([1, 2, 3, 6, 8])
    return _decoder("Bloom", r, {
        "vocab_size": VOCABULARY, "hidden_size": heads * r.choice([4, 6]), "n_layer": r.choice([1, 2, 3]),
        "n_head": heads, **SPECIAL, "layer_norm_epsilon": r.choice([1e-5, 1e-2]),
        "apply_residual_connection_post_layernorm": _flag(r), "tie_word_embeddings": _flag(r),
        "slow_but_exact": False, "num_labels": r.choice([1, 3]),
    })  # fmt: skip


def _opt(r: random.Random) -> Sample:
    heads = r.choice([1, 2, 3])
    d = heads * r.choice([4, 8])
    cls = r.choice(["OPTForCausalLM", "OPTForCausalLM", "OPTModel", "OPTForSequenceClassification"])
    width = r.choice([d, 10]) if cls == "OPTForCausalLM" else d
    return Sample("OPTConfig", cls, {
        "vocab_size": VOCABULARY, "hidden_size": d, "ffn_dim": r.choice([12, 20]),
        "num_hidden_layers": r.choice([1, 2, 3]), "num_attention_heads": heads, "word_embed_proj_dim": width,
        "max_position_embeddings": r.choice([25, 64]), "activation_function": r.choice(ACTIVATIONS),
        "do_layer_norm_before": _flag(r), "enable_bias": _flag(r), "layer_norm_elementwise_affine": _flag(r),
        "_remove_final_layer_norm": _flag(r), "tie_word_embeddings": _flag(r), **SPECIAL,
        "num_labels": r.choice([1, 3]),
    })  # fmt: skip


def _falcon(r: random.Random) -> Sample:
    s = _without(_common(r), "intermediate_size", "hidden_act")
    new, alibi, shared = _flag(r), r.random() < 0.3, _flag(r)
    kv = _shared(r, s["num_attention_heads"]) if new or shared else s["num_attention_heads"]
    return _decoder("Falcon", r, {
        **s, **({} if alibi else _rotary(r, s)), "alibi": alibi, "new_decoder_architecture": new,
        "multi_query": shared, "parallel_attn": new or _flag(r), "bias": _flag(r),
        "num_kv_heads": kv, "num_ln_in_parallel_attn": r.choice([None, 1, 2] if new else [None, 1]),
        "activation": r.choice(ACTIVATIONS),
        "ffn_hidden_size": r.choice([20, 4 * s["hidden_size"]]), "layer_norm_epsilon": r.choice([1e-5, 1e-2]),
        "rope_theta": r.choice([30.0, 1e4]),
    })  # fmt: skip


ENCODERS: dict[str, Draw] = {
    "bert": _bert, "roberta": _roberta("Roberta"), "xlm-roberta": _roberta("XLMRoberta"),
    "distilbert": _distilbert, "albert": _albert, "electra": _electra,
}  # fmt: skip
ENCODER_DECODERS: dict[str, Draw] = {
    "bart": _bart("Bart", *GENERATORS), "mbart": _bart("MBart", *GENERATORS),
    "pegasus": _bart("Pegasus", *GENERATORS), "m2m_100": _m2m100, "marian": _marian, "t5": _t5("T5"),
    "mt5": _t5("MT5"),
}  # fmt: skip
DECODERS: dict[str, Draw] = {
    "llama": _llama, "mistral": _mistral, "mixtral": _mixtral, "qwen2": _qwen2, "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe, "olmo2": _olmo2, "gemma": _gemma, "gemma2": _gemma2, "gemma3_text": _gemma3,
    "gpt_neox": _gpt_neox, "phi": _phi, "starcoder2": _starcoder2, "gpt2": _gpt2, "bloom": _bloom,
    "opt": _opt, "falcon": _falcon,
}  # fmt: skip
ALL = {**ENCODERS, **ENCODER_DECODERS, **DECODERS}


def draw(family: str, seed: int) -> Sample:
    """The seed-th configuration of a family."""
    return ALL[family](random.Random(f"{family} {seed}"))
