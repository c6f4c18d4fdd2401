"""Any intermediate by name, through the one code path that there is."""

from __future__ import annotations

import pytest
import torch

import isoform as iso
from isoform.errors import ConfigError
from isoform.nn import Cache, capture
from networks import batch, inputs, network, preset
from tolerances import close, off

ATTENTION = {"queries", "keys", "values", "scores", "weights", "context"}
RESIDUAL = {"normalised", "increment", "sum", "output"}


def names(model, given, *patterns):
    with capture(model, *patterns) as seen:
        model(**given)
    return set(seen)


def test_names_of_an_encoder_decoder():
    """The whole list: dotted paths of modules, then what happens in them."""
    model = network(preset("original", n_encoder_layers=1, n_decoder_layers=1))
    embedding = {"tokens", "position", "sum", "output"}
    expected = {f"{e}.{n}" for e in ("embedding", "source_embedding") for n in embedding}
    for side, sublayers in (("encoder", ("attention",)), ("decoder", ("attention", "cross_attention"))):
        for sublayer in sublayers:
            expected |= {f"{side}.layers.0.{sublayer}.body.{n}" for n in ATTENTION}
        for sublayer in (*sublayers, "feed_forward"):
            expected |= {f"{side}.layers.0.{sublayer}.{n}" for n in RESIDUAL}
        expected |= {f"{side}.layers.0.feed_forward.body.{n}" for n in ("preactivation", "hidden")}
        expected.add(f"{side}.output")
    expected |= {"head.input", "head.logits"}
    assert names(model, inputs(model.config), "*") == expected


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llama", {"decoder.layers.1.feed_forward.body.gate", "decoder.layers.1.feed_forward.body.content"}),
        (
            "gpt_neox",
            {"decoder.layers.1.normalised", "decoder.layers.1.increment", "decoder.layers.1.output"},
        ),
        ("mixtral", {"decoder.layers.1.feed_forward.body.router.router"}),
        ("bert", {"encoder.layers.1.attention.body.weights", "embedding.sum"}),
    ],
)
def test_names_of_other_parts(name, more):
    model = network(preset(name))
    assert more <= names(model, inputs(model.config), "*")


@pytest.mark.parametrize(
    "name", ["original", "gpt2", "llama", "bloom", "t5", "gemma2", "mixtral", "gpt_neox"]
)
def test_looking_changes_nothing(name):
    """With everything captured, attention written out too, forward and gradients are what they were."""
    model = network(preset(name))
    given = inputs(model.config)
    results = []
    for patterns in ((), ("*",)):
        model.zero_grad()
        with capture(model, *patterns):
            out = model(**given)
        out.logits.square().sum().backward()
        results.append([out.logits, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1])
    assert all(close(a, b) for a, b in zip(*results, strict=True))


def test_only_named_attention_is_written_out(monkeypatch):
    """No second code path: the layer asked for gives its weights, the others go on with the fused kernel."""
    model = network(preset("gpt2")).set_attention("sdpa")
    fused = torch.nn.functional.scaled_dot_product_attention
    calls = []
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or fused(*a, **k)
    )
    with capture(model, "decoder.layers.1.attention.body.weights") as seen:
        model(batch())
    assert list(seen) == ["decoder.layers.1.attention.body.weights"]
    assert len(calls) == 1
    calls.clear()
    with capture(model, "decoder.layers.1.attention.body.context"):
        model(batch())
    assert len(calls) == 2


def test_captured_tensors_are_the_ones_computed_with():
    model = network(preset("gpt2"))
    with capture(model, "*.body.weights", "*.body.values", "*.body.context") as seen:
        model(batch())
    for i in range(2):
        path = f"decoder.layers.{i}.attention.body"
        read = seen[f"{path}.weights"] @ seen[f"{path}.values"]
        assert close(seen[f"{path}.context"], read.transpose(1, 2).flatten(-2))


def test_weights_of_padded_queries_are_zero():
    """R4, as one sees it: every other row sums to one."""
    model, tokens = network(preset("bert")), batch()
    with capture(model, "encoder.layers.0.attention.body.weights") as seen:
        model(tokens)
    sums = seen["encoder.layers.0.attention.body.weights"].sum(-1)
    expected = tokens.real[:, None].expand(-1, 6, -1).double()
    assert close(sums, expected)


def test_gradients_reach_what_was_captured():
    model = network(preset("gpt2"))
    with capture(model, "embedding.output", "decoder.layers.0.attention.output") as seen:
        hidden = model(batch()).hidden
    for value in seen.values():
        (gradient,) = torch.autograd.grad(hidden.sum(), value, retain_graph=True)
        assert gradient.abs().max() > 0


# --- replacing --------------------------------------------------------------------------------------------


def test_the_network_goes_on_with_the_replacement():
    model = network(preset("gpt2"))
    other = torch.randn(3, 9, 24, dtype=torch.float64)
    with capture(
        model,
        "decoder.layers.1.attention.normalised",
        replace={"decoder.layers.0.feed_forward.output": lambda _: other},
    ) as seen:
        replaced = model(batch()).hidden
    assert close(
        seen["decoder.layers.1.attention.normalised"], model.decoder.layers[1].attention.before(other)
    )
    assert off(replaced, model(batch()).hidden) > 0.01


@pytest.mark.parametrize("name", ["queries", "keys", "values", "scores", "weights", "context"])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_every_part_of_attention_can_be_replaced(name, backend):
    """Also under the fused backend: what cannot be reached inside a kernel is written out."""
    model = network(preset("gpt2")).set_attention(backend)
    path = f"decoder.layers.0.attention.body.{name}"
    plain = model(batch()).hidden
    with capture(model, path, replace={path: lambda x: x.flip(1)}) as seen:
        changed = model(batch()).hidden
    with capture(model, path) as before:
        model(batch())
    assert torch.equal(seen[path], before[path].flip(1))  # what is kept is what the network went on with
    assert off(changed, plain) > 0.001


def test_silencing_a_head_is_leaving_out_its_rows():
    """Weights of one head made zero: what its slice of the output projection would have added is missing."""
    model = network(preset("gpt2", n_layers=1))
    path, body = "decoder.layers.0.attention", model.decoder.layers[0].attention.body
    with capture(model, f"{path}.increment", f"{path}.body.context") as whole:
        model(batch())

    def silence(weights):
        return weights * torch.tensor([1.0, 1, 0, 1, 1, 1], dtype=weights.dtype)[:, None, None]

    with capture(model, f"{path}.increment", replace={f"{path}.body.weights": silence}) as seen:
        model(batch())
    share = whole[f"{path}.body.context"][..., 8:12] @ body.output.weight[:, 8:12].T
    assert close(seen[f"{path}.increment"], whole[f"{path}.increment"] - share)


# --- edges ------------------------------------------------------------------------------------------------


def test_a_name_that_nothing_has_is_refused_with_the_nearest():
    model = network(preset("gpt2"))
    with (
        pytest.raises(
            ConfigError, match=r"nothing is called 'decoder\.layers\.0\.atention\.output'.*attention\.output"
        ),
        capture(model, "decoder.layers.0.atention.output"),
    ):
        model(batch())
    with (
        pytest.raises(ConfigError, match="nothing is called 'nowhere'"),
        capture(model, replace={"nowhere": lambda x: x}),
    ):
        model(batch())


def test_one_recorder_at_a_time_and_none_is_left_behind():
    model = network(preset("gpt2"))
    with capture(model, "*.output"):
        with pytest.raises(ConfigError, match="already recording"), capture(model, "*.output"):
            pass
        model(batch())
    with pytest.raises(RuntimeError, match="boom"), capture(model, "*"):
        raise RuntimeError("boom")
    with capture(model, "embedding.output") as seen:
        model(batch())
    assert len(seen) == 1


def test_cached_steps_are_seen_too():
    model = network(preset("gpt2"))
    cache = Cache.allocate(model.config, 3, 12, dtype=torch.float64)
    path = "decoder.layers.1.attention.body.weights"
    with torch.no_grad(), capture(model, path) as seen:
        model.hidden(batch(), cache=cache)
        assert seen[path].shape == (3, 6, 9, 9)
        model.hidden(iso.Tokens(torch.tensor([[1], [2], [3]])), cache=cache)
    assert seen[path].shape == (3, 6, 1, 12)
    reach = (seen[path][:, 0, 0] > 0).sum(-1)
    assert reach.tolist() == [10, 5, 8]


def test_the_dtype_of_weights_is_the_networks():
    model = network(preset("gpt2")).bfloat16()
    with capture(model, "decoder.layers.0.attention.body.*") as seen:
        model(batch())
    dtypes = {key.rpartition(".")[2]: value.dtype for key, value in seen.items()}
    assert dtypes["queries"] == dtypes["context"] == torch.bfloat16
