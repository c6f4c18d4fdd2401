"""First values: seeded, Glorot-uniform by the shape of each projection, branches of Pre-LN stacks shrunk."""

from __future__ import annotations

import math

import pytest
import torch

from isoform.nn import build
from networks import preset

BASE = {"d_model": 96, "n_heads": 4, "head_width": 24, "ffn_width": 200}


def names(model, ending):
    return [p for n, p in model.named_parameters() if n.endswith(ending)]


def spread(weight, fan_in, fan_out, factor=1.0):
    """Within Glorot's bound, and as spread out as uniform numbers within it are."""
    bound = factor * math.sqrt(6.0 / (fan_in + fan_out))
    assert weight.abs().max() <= bound
    assert weight.abs().max() > 0.95 * bound
    assert abs(float(weight.detach().std()) * math.sqrt(3) / bound - 1) < 0.05


def test_a_seed_decides_whatever_the_global_state_is():
    models = []
    for state, seed in ((5, 1), (6, 1), (5, 2)):
        torch.manual_seed(state)
        models.append(build(preset("gpt2"), seed=seed))
    a, b, c = models
    same = [torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True)]
    assert all(same)
    assert not torch.equal(a.embedding.weight, c.embedding.weight)


def test_without_a_seed_the_global_state_decides():
    torch.manual_seed(5)
    a = build(preset("gpt2"))
    torch.manual_seed(5)
    assert torch.equal(a.embedding.weight, build(preset("gpt2")).embedding.weight)
    assert not torch.equal(a.embedding.weight, build(preset("gpt2")).embedding.weight)


def test_each_part_of_a_packed_projection_has_its_own_bound():
    """Key and value heads are fewer than query heads, so their bound is wider."""
    model = build(preset("original", **{k: v for k, v in BASE.items() if k != "head_width"}), seed=0)
    body = model.decoder.layers[0].attention.body
    for part in ("query", "key", "value"):
        spread(body.qkv.part(part), 96, 96)
    grouped = build(preset("llama", **BASE, n_kv_heads=1), seed=0).decoder.layers[0]
    spread(grouped.attention.body.qkv.part("query"), 96, 96)
    spread(grouped.attention.body.qkv.part("value"), 96, 24)
    spread(grouped.feed_forward.body.gate_up.part("gate"), 96, 200)


@pytest.mark.parametrize(("name", "factor"), [("pre_ln", (2 * 2) ** -0.5), ("original", 1.0)])
def test_last_projections_of_branches(name, factor):
    """Divided by √(2 · layers) where nothing normalises the sum (Radford et al. 2019), else as all others."""
    model = build(preset(name, d_model=96, n_heads=4, ffn_width=200), seed=0)
    for side in (model.encoder, model.decoder):
        for layer in side.layers:
            spread(layer.attention.body.output.weight, 96, 96, factor)
            spread(layer.feed_forward.body.down.weight, 200, 96, factor)
            spread(layer.feed_forward.body.up.weight, 96, 200)
    for layer in model.decoder.layers:
        spread(layer.cross_attention.body.output.weight, 96, 96, factor)


def test_experts_each_as_a_matrix_of_its_own():
    model = build(preset("mixtral", d_model=96, n_heads=4, ffn_width=200), seed=0)
    body = model.decoder.layers[0].feed_forward.body
    for expert in body.up:
        spread(expert, 96, 400)
    for expert in body.down:
        spread(expert, 200, 96, (2 * 2) ** -0.5)


def test_tables_biases_and_gains():
    model = build(preset("bert", vocab_size=400, d_model=96, n_heads=4, embedding_width=96), seed=0)
    assert abs(float(model.embedding.weight.detach().std()) * 96**0.5 - 1) < 0.05
    assert abs(float(model.embedding.positions.weight.detach().std()) * 96**0.5 - 1) < 0.05
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif "norm" in name or "after_sum" in name:
            assert (parameter == 1).all(), name


def test_a_gain_with_an_offset_is_one_in_sum():
    model = build(preset("gemma2"), seed=0)
    gain = model.decoder.final_norm
    assert gain.cfg.gain_offset == 1.0
    assert (gain.weight == 0).all()


def test_nothing_is_drawn_without_storage():
    with torch.device("meta"):
        model = build(preset("gpt2"), seed=0)
    assert next(model.parameters()).is_meta


@pytest.mark.parametrize("name", ["original", "llama", "mixtral", "bert"])
def test_a_seed_draws_nothing_from_the_global_generator(name):
    before = torch.random.get_rng_state()
    model = build(preset(name), seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    drawn = [n for n, p in model.named_parameters() if p.dim() > 1 and not p.any()]
    assert not drawn  # every matrix got first values
