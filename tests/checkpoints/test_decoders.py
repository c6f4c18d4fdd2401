"""Causal decoders with LayerNorm, and Gemma, agree with transformers."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))
parity = importlib.import_module("parity")

HIDDEN = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2,
    "num_attention_heads": 6, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
GPT2 = {"vocab_size": 61, "n_embd": 24, "n_layer": 3, "n_head": 6, "n_positions": 32, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
FALCON = {k: v for k, v in HIDDEN.items() if k != "intermediate_size"}
BLOOM = {"vocab_size": 61, "hidden_size": 24, "n_layer": 2, "n_head": 6, "pad_token_id": 0, "eos_token_id": 2,
         "bos_token_id": 1}  # fmt: skip
GEMMA = {**HIDDEN, "num_key_value_heads": 3, "head_dim": 6, "num_hidden_layers": 3}
CASES: dict[str, tuple[str, str, dict[str, Any], bool]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {**GPT2, "n_inner": 20}, True),
    "gpt2-untied": (
        "GPT2Config", "GPT2LMHeadModel",
        {**GPT2, "tie_word_embeddings": False, "activation_function": "relu", "layer_norm_epsilon": 1e-2},
        True,
    ),
    "gpt2-by-layer": (
        "GPT2Config", "GPT2LMHeadModel", {**GPT2, "scale_attn_by_inverse_layer_idx": True}, True,
    ),
    "gpt2-unscaled": ("GPT2Config", "GPT2LMHeadModel", {**GPT2, "scale_attn_weights": False}, True),
    "gpt_neox": (
        "GPTNeoXConfig", "GPTNeoXForCausalLM",
        {**HIDDEN, "num_attention_heads": 3, "rotary_pct": 0.5, "rotary_emb_base": 40}, True,
    ),
    "gpt_neox-sequential": (
        "GPTNeoXConfig", "GPTNeoXForCausalLM",
        {**HIDDEN, "num_attention_heads": 3, "rotary_pct": 1.0, "use_parallel_residual": False,
         "hidden_act": "gelu_new", "attention_bias": False, "tie_word_embeddings": True,
         "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, True,
    ),
    "opt": ("OPTConfig", "OPTForCausalLM", {**FALCON, "ffn_dim": 20, "word_embed_proj_dim": 24}, False),
    "opt-post-narrow": (
        "OPTConfig", "OPTForCausalLM",
        {**FALCON, "ffn_dim": 20, "word_embed_proj_dim": 10, "do_layer_norm_before": False}, False,
    ),
    "opt-bare": (
        "OPTConfig", "OPTForCausalLM",
        {**FALCON, "ffn_dim": 20, "word_embed_proj_dim": 24, "enable_bias": False,
         "_remove_final_layer_norm": True,
         "tie_word_embeddings": False, "activation_function": "gelu"}, False,
    ),
    "bloom": ("BloomConfig", "BloomForCausalLM", BLOOM, False),
    "bloom-normalised-residual": (
        "BloomConfig", "BloomForCausalLM",
        {**BLOOM, "n_head": 4, "apply_residual_connection_post_layernorm": True, "layer_norm_epsilon": 1e-2},
        False,
    ),
    "falcon-7b": (
        "FalconConfig", "FalconForCausalLM",
        {**FALCON, "num_attention_heads": 3, "ffn_hidden_size": 20, "rope_theta": 40.0}, True,
    ),
    "falcon-40b": (
        "FalconConfig", "FalconForCausalLM",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 3, "bias": True}, True,
    ),
    "falcon-new-one-norm": (
        "FalconConfig", "FalconForCausalLM",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1,
         "tie_word_embeddings": False}, True,
    ),
    "falcon-rw": (
        "FalconConfig", "FalconForCausalLM",
        {**FALCON, "multi_query": False, "parallel_attn": False, "bias": True, "activation": "gelu_new"},
        True,
    ),
    "falcon-alibi": (
        "FalconConfig", "FalconForCausalLM",
        {**FALCON, "multi_query": False, "parallel_attn": False, "bias": True, "alibi": True}, True,
    ),
    "phi": (
        "PhiConfig", "PhiForCausalLM",
        {**HIDDEN, "num_attention_heads": 3, "rope_theta": 30.0, "partial_rotary_factor": 0.5}, True,
    ),
    "phi-normed-grouped": (
        "PhiConfig", "PhiForCausalLM",
        {**HIDDEN, "num_key_value_heads": 2, "qk_layernorm": True, "partial_rotary_factor": 1.0}, True,
    ),
    "starcoder2": (
        "Starcoder2Config", "Starcoder2ForCausalLM",
        {**HIDDEN, "num_key_value_heads": 3, "sliding_window": 5}, True,
    ),
    "starcoder2-bare": (
        "Starcoder2Config", "Starcoder2ForCausalLM",
        {**HIDDEN, "num_key_value_heads": 2, "use_bias": False, "tie_word_embeddings": False}, True,
    ),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", GEMMA, True),
    "gemma-biased": (
        "GemmaConfig", "GemmaForCausalLM",
        {**GEMMA, "attention_bias": True, "hidden_act": "gelu", "tie_word_embeddings": False}, True,
    ),
    "gemma2": (
        "Gemma2Config", "Gemma2ForCausalLM",
        {**GEMMA, "sliding_window": 5, "query_pre_attn_scalar": 10, "attn_logit_softcapping": 2.0,
         "final_logit_softcapping": 3.0}, True,
    ),
    "gemma3": (
        "Gemma3TextConfig", "Gemma3ForCausalLM",
        {**GEMMA, "sliding_window": 5, "query_pre_attn_scalar": 12, "rope_theta": 60.0,
         "rope_local_base_freq": 20.0, "rope_scaling": {"rope_type": "linear", "factor": 3.0},
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_agrees(name: str, tmp_path: Path) -> None:
    config_name, cls_name, settings, positions = CASES[name]
    config = getattr(transformers, config_name)(**settings)
    # Falcon's eager path adds the ALiBi bias twice; its fused one, the default, once.
    config._attn_implementation = "sdpa" if name == "falcon-alibi" else "eager"
    cls = getattr(transformers, cls_name)
    torch.manual_seed(0)
    hf = parity.perturb(cls(config))
    case = parity.imported(hf, tmp_path / "in")
    for side in ("right", "left"):
        tokens = parity.ragged(61, (17, 9, 3), side)
        parity.compare_outputs(case, tokens, parity.their_inputs(tokens, positions=positions))
    parity.round_trip(case, tmp_path / "out", cls)
