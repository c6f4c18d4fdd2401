"""Llama and its relatives agree with transformers: scores, gradients, greedy tokens, round trip."""

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

SMALL = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 128, "rope_theta": 50.0,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 4, "rms_norm_eps": 3e-3}),
    "llama-wide-heads-biased-tied": (
        "Llama",
        {"head_dim": 10, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
         "hidden_act": "gelu_new", "num_key_value_heads": 1},
    ),
    "llama-linear": ("Llama", {"head_dim": 8, "rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    "llama-llama3": (
        "Llama",
        {"head_dim": 8, "rope_scaling": {
            "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0,
            "original_max_position_embeddings": 16}},
    ),
    "llama-yarn": (
        "Llama",
        {"head_dim": 8, "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, "beta_fast": 3.0}},
    ),
    "llama-yarn-mscale": (
        "Llama",
        {"head_dim": 8, "rope_scaling": {
            "rope_type": "yarn", "factor": 2.5, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False}},
    ),
    "mistral": ("Mistral", {"head_dim": 4, "sliding_window": 5}),
    "mistral-full": ("Mistral", {"head_dim": 4, "sliding_window": None, "num_key_value_heads": 6}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 6, "attention_bias": True}),
    "qwen3-windows": (
        "Qwen3",
        {"head_dim": 6, "use_sliding_window": True, "sliding_window": 4,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {"head_dim": 6, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 10,
         "decoder_sparse_step": 2},
    ),
    "qwen3_moe-renormalised": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 8, "norm_topk_prob": True,
         "mlp_only_layers": [1]},
    ),
    "olmo2": ("Olmo2", {"rms_norm_eps": 1e-3}),
    "olmo2-grouped": ("Olmo2", {"num_key_value_heads": 2, "attention_bias": True}),
}  # fmt: skip


def make(name: str) -> tuple[Any, type]:
    family, changes = CASES[name]
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **changes})
    config._attn_implementation = "eager"
    cls = getattr(transformers, f"{family}ForCausalLM")
    torch.manual_seed(0)
    return parity.perturb(cls(config)), cls


@pytest.mark.parametrize("name", CASES)
def test_agrees(name: str, tmp_path: Path) -> None:
    hf, cls = make(name)
    case = parity.imported(hf, tmp_path / "in")
    for side in ("right", "left"):
        tokens = parity.ragged(61, (17, 9, 3), side)
        parity.compare_outputs(case, tokens, parity.their_inputs(tokens, positions=True))
    parity.round_trip(case, tmp_path / "out", cls)
