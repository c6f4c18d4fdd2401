"""Float64, float32, bfloat16, float16 and autocast: one function but for rounding."""

from __future__ import annotations

import copy

import pytest
import torch

from networks import inputs, network, preset
from tolerances import close

FAMILIES = ["original", "pre_ln", "bert", "gpt2", "llama", "bloom", "t5", "gemma2", "mistral", "qwen3"]
HALF = [torch.bfloat16, torch.float16]


def exact(model, dtype):
    """In float64 with the weights as `dtype` holds them, so that only the computing differs."""
    rounded = copy.deepcopy(model).to(dtype)
    return rounded, copy.deepcopy(rounded).double()


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_hidden_states(name, dtype):
    model, reference = exact(network(preset(name)), dtype)
    given = inputs(model.config)
    real = given["tokens"].real
    with torch.no_grad():
        found, expected = model(**given).hidden, reference(**given).hidden
    assert found.dtype == dtype
    assert close(found[real], expected[real], dtype)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_gradients_are_finite_and_have_the_dtype_of_the_weights(dtype, backend):
    model = network(preset("original")).to(dtype).set_attention(backend)
    given = inputs(model.config)
    (1e-2 * model(**given).hidden[given["tokens"].real].float().square().sum()).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) == len(list(model.parameters()))
    assert all(g.isfinite().all() and g.dtype == dtype for g in gradients)


@pytest.mark.parametrize("name", ["original", "llama", "t5"])
def test_autocast_keeps_weights_and_gradients_wide(name):
    """Products in bfloat16, the rest in float32: nearer than a network in bfloat16 has to be."""
    model = network(preset(name)).float()
    given = inputs(model.config)
    real = given["tokens"].real
    with torch.autocast("cpu", torch.bfloat16):
        out = model(**given)
        assert out.logits.dtype == torch.bfloat16
        found = out.hidden[real]
        out.logits.float().square().mean().backward()
    assert close(found, copy.deepcopy(model).double()(**given).hidden[real], torch.bfloat16)
    assert all(
        p.grad is None or (p.grad.dtype == torch.float32 and p.grad.isfinite().all())
        for p in model.parameters()
    )


def test_routing_in_half_precision():
    """A router may choose otherwise when two scores are nearly equal; with no choice, states are near."""
    model, reference = exact(network(preset("mixtral", top_k=4)), torch.bfloat16)  # every expert: no choice
    given = inputs(model.config)
    real = given["tokens"].real
    with torch.no_grad():
        assert close(model(**given).hidden[real], reference(**given).hidden[real], torch.bfloat16)
