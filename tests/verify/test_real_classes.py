"""Ours against classes of transformers: no accusation where they agree, the one planted cause where not."""

from __future__ import annotations

import pytest
import torch

import isoform as iso
from isoform.verify import diagnose

transformers = pytest.importorskip("transformers")

IDS = torch.arange(24).reshape(2, 12) * 7 % 61
INPUTS = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
SIZES = {
    "vocab_size": 61, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2,
}  # fmt: skip


class Ours(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return self.model(iso.Tokens(input_ids)).logits


def theirs(config, kind, attention="eager"):
    torch.manual_seed(0)
    config._attn_implementation = attention
    model = kind(config)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * (torch.rand(parameter.shape, generator=noise) - 0.5)
    return model.double().eval()


def ours(model, folder):
    model.save_pretrained(folder)
    return Ours(iso.load(folder, dtype=torch.float64).model)


def kinds(a, b):
    return [finding.kind for finding in diagnose(a, b, INPUTS).findings]


def llama(**changes):
    config = transformers.LlamaConfig(**SIZES, **changes)
    return theirs(config, transformers.LlamaForCausalLM)


def falcon(attention):
    config = transformers.FalconConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True,
        new_decoder_architecture=False, multi_query=True, parallel_attn=True, bias=False,
    )  # fmt: skip
    return theirs(config, transformers.FalconForCausalLM, attention)


def test_grouped_heads_are_no_accusation(tmp_path):
    reference = llama()
    assert kinds(reference, ours(reference, tmp_path)) == []


@pytest.mark.parametrize(
    ("change", "kind"), [({"rope_theta": 500.0}, "rope-frequency"), ({}, "attention-scale")]
)
def test_one_fault_beside_grouped_heads_is_one_finding(tmp_path, change, kind):
    """How queries that share keys are laid out in ours is not a second fault."""
    reference, other = llama(), llama(**change)
    candidate = ours(other, tmp_path)
    if not change:
        for layer in reference.model.layers:
            layer.self_attn.scaling *= 1.5
    assert kinds(reference, candidate) == [kind]


def test_falcon_adds_its_distances_twice_when_attention_is_written_out(tmp_path):
    """transformers 4.57: with ALiBi the mask holds the biases already, and the eager path adds them again."""
    eager, fused = falcon("eager"), falcon("sdpa")
    assert kinds(fused, ours(fused, tmp_path)) == []
    found = diagnose(eager, ours(eager, tmp_path), INPUTS).findings
    assert [finding.kind for finding in found] == ["alibi-slope"]
    assert "0.1768, 0.04419" in found[0].statement and "0.08839, 0.0221" in found[0].statement
