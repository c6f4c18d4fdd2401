"""One graph for a whole pass, and one for a cached step: `torch.compile(fullgraph=True)`, both ways."""

from __future__ import annotations

import shutil

import pytest
import torch

import isoform as iso
from isoform import config
from isoform.nn import Cache
from networks import batch, inputs, network, preset
from tolerances import close

NAMES = ["bert", "gpt2", "llama", "bloom", "t5", "gemma2", "original", "mixtral"]


@pytest.fixture(autouse=True)
def fresh():
    """Each test traces anew."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def loss(model, given):
    logits = model(**given).logits[given["tokens"].real_or_ones()]
    return (logits * torch.arange(logits.numel()).cos().view_as(logits)).sum()


def results(model, given, run):
    model.zero_grad()
    value = loss(run, given)
    value.backward()
    return value, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def check(name, side, backend, dtype=torch.float64):
    layers = ("n_encoder_layers", "n_decoder_layers") if name == "original" else ("n_layers",)
    model = network(preset(name, **dict.fromkeys(layers, 1)))
    given = inputs(model.config, side)
    expected, gradients = results(model, given, model)
    found, compiled = results(model, given, torch.compile(model, fullgraph=True, backend=backend))
    assert close(found, expected, dtype)
    assert compiled.keys() == gradients.keys()
    assert all(close(compiled[n], gradients[n], dtype) for n in gradients)


def test_one_graph():
    """Encoder, decoder and what joins them. Traced, backward too, but not generated: needs no compiler."""
    check("original", "right", "aot_eager")


@pytest.mark.soak
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", NAMES)
def test_one_graph_of_every_kind(name, side):
    check(name, side, "aot_eager")


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("name", ["original", "llama", "t5"])
def test_generated_code(name):
    """Sines of float32 angles come from another library there, so the tables agree to float32 only."""
    check(name, "left", "inductor", torch.float32)


@pytest.mark.parametrize("name", ["llama", pytest.param("original", marks=pytest.mark.soak)])
def test_one_compiled_step_serves_every_position(name):
    """Lengths are tensors: the second step and the tenth run the same graph, none is traced again."""
    model = network(preset(name))
    source = batch(2, "right", (5, 8, 3)) if model.config.source is not None else None
    tokens = batch()
    traced = []

    def backend(graph, _):
        traced.append(1)
        return graph.forward

    def step(ids, cache):
        return model.head(model.hidden(iso.Tokens(ids), cache=cache))

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    logits = {}
    with torch.no_grad():
        for run in (step, compiled):
            cache = Cache.allocate(model.config, 3, 24, dtype=torch.float64)
            if source is not None:
                model.remember(cache, model.encode(source))
            model.hidden(tokens, cache=cache)
            logits[run] = [run(torch.full((3, 1), i), cache) for i in range(1, 11)]
    assert len(traced) == 1
    assert all(close(a, b) for a, b in zip(logits[compiled], logits[step], strict=True))


def test_experts_traced_and_not_are_one_function():
    """Traced, every expert runs on every token; else each on its own. Unchosen ones weigh nothing."""
    cfg = preset("mixtral", n_layers=1)
    expert = config.TwoLayer(width=7, activation="gelu", bias_up=True, bias_down=True)
    cfg = cfg.replace(decoder__layer__feed_forward__expert=expert)
    model = network(cfg)
    experts = model.decoder.layers[0].feed_forward.body
    x = torch.randn(2, 5, 24, dtype=torch.float64, requires_grad=True)
    (plain,) = torch.autograd.grad(experts(x).square().sum(), x)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    assert close(compiled(x), experts(x))
    (traced,) = torch.autograd.grad(compiled(x).square().sum(), x)
    assert close(traced, plain)
