"""R27: one matrix for input, source and output, only where a row means the same token in each."""

from __future__ import annotations

import pytest
import torch

import isoform as iso
from isoform.errors import ConfigError
from isoform.nn import build
from networks import VOCAB, network, preset
from tolerances import close, off

IDS, SOURCE = torch.tensor([[3, 5, 5, 9]]), torch.tensor([[2, 9, 7]])


def three_ways():
    """`original` ties head, target and source; gradients are asked for with each use of the table apart."""
    return network(preset("original"))


def loss(logits):
    return torch.nn.functional.cross_entropy(logits[0], torch.tensor([5, 5, 9, 1]))


def test_there_is_one_parameter():
    model = three_ways()
    assert model.head.weight is model.embedding.weight is model.source_embedding.weight
    assert model.tied() == [("embedding.weight", "source_embedding.weight", "head.weight")]
    assert sum(p.shape == (VOCAB, 24) for p in model.parameters()) == 1


@pytest.mark.parametrize(("head", "source"), [(True, True), (True, False), (False, True), (False, False)])
def test_each_tie_is_its_own(head, source):
    model = build(preset("original").replace(tie_source=source, head__tied=head))
    assert (model.head.weight is model.embedding.weight) == head
    assert (model.source_embedding.weight is model.embedding.weight) == source


def test_the_gradient_is_the_sum_of_all_paths():
    """(6.36): with three tables of equal value there are three gradients; their sum is that of the one."""
    tied = three_ways()
    apart = network(preset("original").replace(tie_source=False, head__tied=False))
    apart.load_state_dict(tied.state_dict())
    for model in (tied, apart):
        loss(model(iso.Tokens(IDS), source=iso.Tokens(SOURCE)).logits).backward()
    paths = [apart.embedding.weight.grad, apart.source_embedding.weight.grad, apart.head.weight.grad]
    assert close(tied.embedding.weight.grad, sum(paths))
    assert all(path.abs().max() > 1e-9 for path in paths)  # none of the three is empty


def test_a_token_absent_from_the_input_still_gets_a_gradient():
    """Exercise 6.10: through the softmax's denominator, and only in the tied table."""
    model = three_ways()
    loss(model(iso.Tokens(IDS), source=iso.Tokens(SOURCE)).logits).backward()
    absent = [i for i in range(VOCAB) if i not in {*IDS[0].tolist(), *SOURCE[0].tolist(), 1}]
    assert all(model.embedding.weight.grad[i].abs().max() > 1e-6 for i in absent)
    apart = network(preset("original").replace(tie_source=False, head__tied=False))
    loss(apart(iso.Tokens(IDS), source=iso.Tokens(SOURCE)).logits).backward()
    assert all(apart.embedding.weight.grad[i].abs().max() == 0 for i in absent)
    assert all(apart.head.weight.grad[i].abs().max() > 1e-6 for i in absent)


def test_the_gradient_of_the_tied_table_by_hand():
    """(p - y)ᵀ h on the output's path, and what comes back through h on the inputs' paths."""
    model = three_ways()
    with iso.capture(model, "head.input") as seen:
        out = model(iso.Tokens(IDS), source=iso.Tokens(SOURCE))
    h = seen["head.input"]
    targets = torch.nn.functional.one_hot(torch.tensor([5, 5, 9, 1]), VOCAB)
    error = (out.logits[0].softmax(-1) - targets) / 4
    by_output = error.T @ h[0] * model.head.scale
    (into_h,) = torch.autograd.grad(loss(out.logits), h, retain_graph=True)
    (by_input,) = torch.autograd.grad(h, model.embedding.weight, into_h, retain_graph=True)
    (whole,) = torch.autograd.grad(loss(out.logits), model.embedding.weight)
    assert close(whole, by_output + by_input)


def test_ties_survive_a_change_of_dtype_device_and_state():
    model = three_ways().float().to("cpu")
    model.load_state_dict(model.state_dict())
    assert model.head.weight is model.embedding.weight is model.source_embedding.weight
    with torch.no_grad():
        model.head.weight[4, 0] = 77.0
        assert float(model.embedding.weight[4, 0]) == 77.0


def test_the_same_size_is_not_the_same_vocabulary():
    cfg = preset("original")
    with pytest.raises(ConfigError, match="a shared row must mean the same token"):
        cfg.replace(source__vocabulary="source")
    with pytest.raises(ConfigError, match=r"source\.vocab_size is 24, embedding\.vocab_size is 23"):
        cfg.replace(source__vocab_size=24)
    assert cfg.replace(tie_source=False, source__vocabulary="source").source.vocabulary == "source"


def test_shared_layers_are_one_parameter_used_twice():
    """ALBERT: the gradient of the shared layer is the sum over its uses."""
    model = network(preset("albert"))
    first, second = model.encoder.layers
    assert first is second
    apart = network(preset("albert").replace(encoder__layer_sharing=None))
    apart.load_state_dict(model.state_dict())
    for m in (model, apart):
        m(iso.Tokens(IDS)).hidden.square().sum().backward()
    mine = model.encoder.layers[0].feed_forward.body.up.weight.grad
    a, b = (layer.feed_forward.body.up.weight.grad for layer in apart.encoder.layers)
    assert close(mine, a + b)
    assert off(a, b) > 1e-3
