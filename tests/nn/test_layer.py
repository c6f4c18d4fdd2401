"""Layers composed by hand from their own parts: every placement, residual, scale and increment."""

from __future__ import annotations

import pytest
import torch

from isoform import config
from isoform.nn import capture
from isoform.nn.attention import Attention
from isoform.nn.reading import Reading
from isoform.visibility import Cross, Places
from networks import attention, batch, network, preset, shake
from tolerances import close, off


def one_layer(name="pre_ln_decoder", **changes):
    """A one-layer decoder under the changes, what it embeds, what its sublayers make, what it gives."""
    base = preset("gpt2" if name == "pre_ln_decoder" else name, n_layers=1)
    model = network(base.replace(**{f"decoder.layer.{k}": v for k, v in changes.items()}))
    with capture(model, "*") as seen:
        model(batch())
    return model.decoder.layers[0], seen, seen["embedding.output"]


def body(residual, seen, path):
    """What a sublayer made of what it was given: attention's read, or the feed-forward network's map."""
    if path.endswith("attention"):
        return residual.body.output(seen[f"{path}.body.context"])
    return residual.body(seen[f"{path}.normalised"])


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("placement", ["post", "pre", "sandwich", "res_post"])
def test_placements(placement, scale):
    """R15, (6.20)–(6.21): N(x + αF(x)); x + αF(N(x)); x + αN(F(N(x))); x + αN(F(x))."""
    layer, seen, x = one_layer(placement=placement, residual_scale=scale)
    for path in ("attention", "feed_forward"):
        residual, place = getattr(layer, path), f"decoder.layers.0.{path}"
        before = placement in ("pre", "sandwich")
        assert close(seen[f"{place}.normalised"], residual.before(x) if before else x)
        assert before == (off(seen[f"{place}.normalised"], x) > 0.01)
        increment = body(residual, seen, place)
        if placement in ("sandwich", "res_post"):
            assert off(residual.after_body(increment), increment) > 0.01
            increment = residual.after_body(increment)
        assert close(seen[f"{place}.increment"], increment)
        total = x + scale * increment
        x = residual.after_sum(total) if placement == "post" else total
        assert close(seen[f"{place}.output"], x)
        assert (placement == "post") == (off(x, total) > 0.01)


def test_increments_may_be_added_to_the_normalised_stream():
    layer, seen, x = one_layer(residual_source="normalised")
    path = "decoder.layers.0.attention"
    expected = layer.attention.before(x) + seen[f"{path}.increment"]
    assert close(seen[f"{path}.output"], expected)
    assert off(expected, x + seen[f"{path}.increment"]) > 0.01


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("residual", ["parallel", "parallel_shared_norm"])
def test_parallel_sublayers(residual, scale):
    """x + α(A(N₁ x) + F(N₂ x)); with a shared norm N₂ is N₁."""
    layer, seen, x = one_layer("gpt_neox", residual=residual, residual_scale=scale)
    first = layer.attention_norm(x)
    second = first if residual == "parallel_shared_norm" else layer.feed_forward_norm(x)
    if residual == "parallel":
        assert off(second, first) > 0.01
    read = layer.attention.output(seen["decoder.layers.0.attention.context"])
    expected = x + scale * (read + layer.feed_forward(second))
    assert close(seen["decoder.layers.0.normalised"], first)
    assert close(seen["decoder.layers.0.output"], expected)


@pytest.mark.parametrize("axis", ["head", "projection"])
def test_query_key_norm_of_cross_attention(axis):
    """R42: the memory's keys are normalised once, when they are projected."""
    norm = config.QKNorm(
        norm=config.Norm(kind="rms", eps=1e-3, bias=False), axis=axis, order="before_rotation"
    )
    module = shake(Attention(attention(qk_norm=norm), 10, cross=True))
    memory = torch.randn(2, 5, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    key, value = (part for part in module.key_value.project(memory))
    if axis == "head":
        expected = module.key_norm(key.unflatten(-1, (2, 4)))
    else:
        expected = module.key_norm(key).unflatten(-1, (2, 4))
    found = module.project_memory(memory)
    assert close(found[0], expected.transpose(1, 2))
    assert close(found[1], value.unflatten(-1, (2, 4)).transpose(1, 2))
    x = torch.randn(2, 3, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    reading = Reading(Cross().lower(Places.range(3), Places.range(5)))
    assert close(module(x, reading, memory), module(x, reading, found))
