"""Three porting bugs from public reports, reproduced small: a reference and a port of each, as factories."""

from __future__ import annotations

from unittest import mock

import torch
import transformers


def _shaken(model: torch.nn.Module) -> torch.nn.Module:
    """Gains away from 1, so that no choice hides behind a fresh initialisation."""
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * (torch.rand(parameter.shape, generator=noise) - 0.5)
    return model.double().eval()


def _gemma(activation: str) -> torch.nn.Module:
    config = transformers.GemmaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, hidden_act=activation, hidden_activation=activation,
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    return _shaken(transformers.GemmaForCausalLM(config))


def gemma() -> torch.nn.Module:
    return _gemma("gelu_pytorch_tanh")


def gemma_port() -> torch.nn.Module:
    """The MLP written with the exact GELU: what Lightning-AI/litgpt#1004 mends."""
    return _gemma("gelu")


def llama() -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    return _shaken(transformers.LlamaForCausalLM(config))


def _pairwise(q, k, cos, sin, unsqueeze_dim=1):
    """The rotation of pairs (0, 1), (2, 3) …, as the first Llama code has it."""
    half = cos.shape[-1] // 2
    cos = cos[..., :half].repeat_interleave(2, -1).unsqueeze(unsqueeze_dim)
    sin = sin[..., :half].repeat_interleave(2, -1).unsqueeze(unsqueeze_dim)

    def turned(x):
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)

    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


class _PairwiseLlama(transformers.LlamaForCausalLM):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None):
        with mock.patch("transformers.models.llama.modeling_llama.apply_rotary_pos_emb", _pairwise):
            return super().forward(input_ids, attention_mask=attention_mask)


def llama_port() -> torch.nn.Module:
    """Weights in the layout of halves, code that rotates pairs: jzhang38/TinyLlama#24."""
    port = _PairwiseLlama(llama().config).double().eval()
    port.load_state_dict(llama().state_dict())
    return port


def _gemma2(cap: float | None) -> torch.nn.Module:
    config = transformers.Gemma2Config(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=8, attn_logit_softcapping=cap,
        sliding_window=64, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    return _shaken(transformers.Gemma2ForCausalLM(config))


def gemma2() -> torch.nn.Module:
    return _gemma2(3.0)


def gemma2_port() -> torch.nn.Module:
    """A kernel that leaves the cap on attention scores out: InternLM/lmdeploy#2842."""
    return _gemma2(None)
