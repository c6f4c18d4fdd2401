"""Configurations of decoders drawn by a seed: scores, gradients, greedy and beam tokens, round trip.

What varies: key/value heads, head width, rotary share and scaling, windows, constants, ties, biases,
activations. Padding is ragged on both sides and rows are longer than every window.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from isoform.generation import Beam, Greedy, generate

transformers = pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))
parity = importlib.import_module("parity")

Settings = dict[str, Any]
ACTIVATIONS = ["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "quick_gelu", "tanh"]


def common(r: random.Random) -> Settings:
    heads = r.choice([2, 4, 6])
    return {
        "vocab_size": 61, "hidden_size": heads * r.choice([4, 8]), "intermediate_size": r.choice([12, 20]),
        "num_hidden_layers": r.choice([2, 3]), "num_attention_heads": heads,
        "hidden_act": r.choice(ACTIVATIONS),
        "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "tie_word_embeddings": r.choice([True, False]),
    }  # fmt: skip


def grouped(r: random.Random) -> Settings:
    settings = common(r)
    heads = settings["num_attention_heads"]
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    return {
        **settings, "num_key_value_heads": r.choice(divisors), "head_dim": r.choice([4, 6, 10]),
        "rms_norm_eps": r.choice([1e-6, 1e-5, 1e-2]), "rope_theta": r.choice([30.0, 1e4]),
    }  # fmt: skip


def scaling(r: random.Random) -> Settings | None:
    linear = {"rope_type": "linear", "factor": r.choice([2.0, 3.5])}
    llama3 = {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0,
        "high_freq_factor": r.choice([2.0, 4.0]), "original_max_position_embeddings": 16,
    }  # fmt: skip
    yarn = {
        "rope_type": "yarn", "factor": r.choice([2.0, 4.0]), "original_max_position_embeddings": 24,
        "beta_fast": r.choice([3.0, 32.0]),
    }  # fmt: skip
    return r.choice([None, linear, llama3, yarn])


def layer_norm(r: random.Random) -> Settings:
    return {"layer_norm_epsilon": r.choice([1e-5, 1e-2])}


FAMILIES: dict[str, tuple[str, Callable[[random.Random], Settings]]] = {
    "Llama": ("LlamaForCausalLM", lambda r: {
        **grouped(r), "rope_scaling": scaling(r), "attention_bias": r.random() < 0.5,
        "mlp_bias": r.random() < 0.5}),
    "Mistral": ("MistralForCausalLM", lambda r: {
        **grouped(r), "rope_scaling": scaling(r), "sliding_window": r.choice([None, 3, 7])}),
    "Mixtral": ("MixtralForCausalLM", lambda r: {
        **grouped(r), "sliding_window": r.choice([None, 5]), "num_local_experts": r.choice([3, 4]),
        "num_experts_per_tok": r.choice([1, 2])}),
    "Qwen2": ("Qwen2ForCausalLM", lambda r: {
        **{k: v for k, v in grouped(r).items() if k != "head_dim"}, "rope_scaling": scaling(r),
        "use_sliding_window": True, "sliding_window": r.choice([3, 6]),
        "max_window_layers": r.choice([0, 1])}),
    "Qwen3": ("Qwen3ForCausalLM", lambda r: {
        **grouped(r), "rope_scaling": scaling(r), "attention_bias": r.random() < 0.5}),
    "Qwen3Moe": ("Qwen3MoeForCausalLM", lambda r: {
        **grouped(r), "num_experts": r.choice([3, 5]), "num_experts_per_tok": r.choice([1, 2]),
        "moe_intermediate_size": 8, "norm_topk_prob": r.random() < 0.5,
        "decoder_sparse_step": r.choice([1, 2])}),
    "Olmo2": ("Olmo2ForCausalLM", lambda r: {k: v for k, v in grouped(r).items() if k != "head_dim"}),
    "Gemma": ("GemmaForCausalLM", grouped),
    "Gemma2": ("Gemma2ForCausalLM", lambda r: {
        **grouped(r), "sliding_window": r.choice([3, 8]), "query_pre_attn_scalar": r.choice([4, 11]),
        "attn_logit_softcapping": r.choice([None, 3.0]), "final_logit_softcapping": r.choice([None, 4.0])}),
    "GPTNeoX": ("GPTNeoXForCausalLM", lambda r: {
        **common(r), "rotary_pct": r.choice([0.5, 1.0]), "use_parallel_residual": r.random() < 0.5,
        "attention_bias": r.random() < 0.5, "layer_norm_eps": r.choice([1e-5, 1e-2])}),
    "Phi": ("PhiForCausalLM", lambda r: {
        **common(r), "partial_rotary_factor": r.choice([0.5, 1.0]), "qk_layernorm": r.random() < 0.5,
        "layer_norm_eps": r.choice([1e-5, 1e-2])}),
    "Starcoder2": ("Starcoder2ForCausalLM", lambda r: {
        **common(r), "num_key_value_heads": r.choice([1, 2]), "sliding_window": r.choice([None, 4]),
        "use_bias": r.random() < 0.5, "norm_epsilon": r.choice([1e-5, 1e-2])}),
    "GPT2": ("GPT2LMHeadModel", lambda r: {
        "vocab_size": 61, "n_embd": 24, "n_layer": r.choice([2, 3]), "n_head": r.choice([2, 3, 6]),
        "n_positions": 64, "n_inner": r.choice([None, 20]), "activation_function": r.choice(ACTIVATIONS),
        "scale_attn_by_inverse_layer_idx": r.random() < 0.5, "scale_attn_weights": r.random() < 0.7,
        "tie_word_embeddings": r.random() < 0.5, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        **layer_norm(r)}),
    "Bloom": ("BloomForCausalLM", lambda r: {
        "vocab_size": 61, "hidden_size": 24, "n_layer": 2, "n_head": r.choice([2, 3, 6]), "pad_token_id": 0,
        "eos_token_id": 2, "bos_token_id": 1, **layer_norm(r),
        "apply_residual_connection_post_layernorm": r.random() < 0.5}),
}  # fmt: skip
GRID = [
    pytest.param(name, seed, marks=() if seed == 0 and name in ("Llama", "GPT2") else pytest.mark.long)
    for name in FAMILIES
    for seed in range(5)
]


@pytest.mark.parametrize(("name", "seed"), GRID)
def test_agrees(name: str, seed: int, tmp_path: Path) -> None:
    cls_name, draw = FAMILIES[name]
    settings = draw(random.Random(f"{name} {seed}"))
    config = getattr(transformers, f"{name}Config")(**settings)
    config._attn_implementation = "eager"
    cls = getattr(transformers, cls_name)
    torch.manual_seed(0)
    case = parity.imported(parity.perturb(cls(config)), tmp_path / "in")
    for side in ("right", "left"):
        tokens = parity.ragged(61, (17, 9, 3), side)
        inputs = parity.their_inputs(tokens, positions=name != "Bloom")
        parity.compare_outputs(case, tokens, inputs)
    prompt = parity.ragged(61, (9, 4, 6), "left")
    for width in (1, 4):
        search = Greedy() if width == 1 else Beam(4, length_penalty="length")
        ours = generate(
            case.bundle.model, prompt, max_new_tokens=8, protocol=case.bundle.protocol, search=search
        )
        with parity.honest_float64():
            theirs = case.hf.generate(
                prompt.ids, attention_mask=prompt.real_or_ones().long(), max_new_tokens=8, do_sample=False,
                num_beams=width, length_penalty=1.0, early_stopping=False,
            )  # fmt: skip
        for mine, row in zip(ours.ids, theirs[:, prompt.length :].tolist(), strict=True):
            assert mine == row[: row.index(2) if 2 in row else len(row)], (width, settings)
    parity.round_trip(case, tmp_path / "out", cls)
    case.hf.float(), case.bundle.model.float()
    with torch.no_grad():
        reference = case.hf(**parity.their_inputs(tokens, positions=name != "Bloom")).logits
        parity.close(
            case.bundle.model(tokens).logits[tokens.real_or_ones()], reference[tokens.real_or_ones()],
            "float32", 2e-5,
        )  # fmt: skip
