"""R33: each dropout is set by itself, scales what it keeps, is off in eval, and follows the random state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import isoform as iso
from isoform.nn import capture
from isoform.nn.dropout import dropout
from networks import inputs, network, preset
from tolerances import close

WIDE = torch.float64


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_what_is_kept_is_divided_by_its_share(share, dtype):
    """Inverted scaling: 0 or x/(1 - p); the share of zeros is p within five deviations."""
    torch.manual_seed(0)
    x = torch.full((301, 67), 3.0, dtype=dtype)
    out = dropout(x, share, True)
    kept = torch.tensor(3.0, dtype=dtype) * torch.tensor(1.0, dtype=dtype).mul(1 / (1 - share))
    assert set(out.unique().tolist()) == {0.0, kept.item()}
    n = x.numel()
    assert abs((out == 0).double().mean() - share) < 5 * (share * (1 - share) / n) ** 0.5


def test_expectation_is_the_input():
    torch.manual_seed(1)
    x = torch.randn(40, dtype=WIDE)
    mean = torch.stack([dropout(x, 0.25, True) for _ in range(1000)]).mean(0)
    deviation = x.abs() * (0.25 / 0.75 / 1000) ** 0.5
    assert ((mean - x).abs() < 5 * deviation).all()


def test_elements_drop_independently():
    """Four elements share one draw of 64 bits, and are uncorrelated all the same."""
    torch.manual_seed(2)
    kept = (dropout(torch.ones(200_000), 0.5, True) > 0).double() - 0.5
    for lag in (1, 2, 3, 4, 5, 8):
        assert abs((kept[lag:] * kept[:-lag]).mean() * 4) < 5 / 200_000**0.5


def test_odd_sizes_and_none():
    torch.manual_seed(3)
    for shape in ((0,), (1,), (3, 5), (2, 1, 7)):
        x = torch.ones(shape)
        assert dropout(x, 0.5, True).shape == shape
        assert dropout(x, 0.5, False) is x
        assert dropout(x, 0.0, True) is x


def test_the_gradient_has_the_same_mask():
    torch.manual_seed(4)
    x = torch.randn(50, dtype=WIDE, requires_grad=True)
    out = dropout(x, 0.4, True)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert close(gradient * x, out)
    assert set(gradient.unique().tolist()) == {0.0, 1 / 0.6}


# --- in a network -----------------------------------------------------------------------------------------

RATES = {
    "embedding": ("embedding.dropout", "source.dropout"),
    "weights": (
        "encoder.layer.attention.dropout",
        "decoder.layer.attention.dropout",
        "decoder.layer.cross_attention.dropout",
    ),
    "hidden": ("encoder.layer.feed_forward.dropout", "decoder.layer.feed_forward.dropout"),
    "increment": ("encoder.layer.residual_dropout", "decoder.layer.residual_dropout"),
}


def spied(monkeypatch, which):
    """The shares that modules ask for in one pass of a network that drops in one place alone."""
    cfg = preset("original", n_encoder_layers=1, n_decoder_layers=1)
    model = network(cfg.replace(**dict.fromkeys(RATES[which], 0.5))).train()
    asked = []
    for name in ("attention", "layer", "feed_forward", "embedding", "stack"):
        module = __import__(f"isoform.nn.{name}", fromlist=["dropout"])

        def spy(x, share, training, name=name):
            asked.append((name, share, training))
            return dropout(x, share, training)

        monkeypatch.setattr(module, "dropout", spy)
    model(**inputs(cfg))
    return [name for name, share, training in asked if share and training]


@pytest.mark.parametrize(
    ("which", "places"),
    [
        ("embedding", ["embedding"] * 2),
        ("weights", ["attention"] * 3),
        ("hidden", ["feed_forward"] * 2),
        ("increment", ["layer"] * 5),
    ],
)
def test_four_separate_rates(monkeypatch, which, places):
    """Embeddings, attention weights, hidden units, increments: each setting acts in its own place alone."""
    assert spied(monkeypatch, which) == places


def test_dropped_weights_are_not_renormalised():
    """Attention: what is captured is the distribution; what is read is some of it, each weight doubled."""
    cfg = preset("gpt2", n_layers=1).replace(decoder__layer__attention__dropout=0.5)
    model = network(cfg).train()
    path = "decoder.layers.0.attention.body"
    torch.manual_seed(0)
    identity = torch.eye(9, 4, dtype=WIDE).expand(3, 6, 9, 4)
    with capture(
        model, f"{path}.weights", f"{path}.context", replace={f"{path}.values": lambda _: identity}
    ) as seen:
        model(**inputs(cfg))
    weights, read = (
        seen[f"{path}.weights"][..., :4],
        seen[f"{path}.context"].unflatten(-1, (6, 4)).transpose(1, 2),
    )
    ratio = (read / weights)[weights > 1e-9]
    assert set(ratio.round(decimals=9).tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_attention_dropout_acts_on_both_backends(backend):
    cfg = preset("gpt2", n_layers=1).replace(decoder__layer__attention__dropout=0.5)
    model = network(cfg).set_attention(backend)
    still = model(**inputs(cfg)).hidden
    torch.manual_seed(0)
    assert not torch.allclose(model.train()(**inputs(cfg)).hidden, still)
    assert torch.equal(model.eval()(**inputs(cfg)).hidden, still)


def test_the_same_random_state_drops_the_same():
    """Comparisons run with dropout off, or like this: two networks, one seed."""
    cfg = preset("original", dropout=0.3)
    a, b = network(cfg).train(), network(cfg).train()
    results = []
    for model, seed in ((a, 7), (b, 7), (a, 8)):
        torch.manual_seed(seed)
        results.append(model(**inputs(cfg)).hidden)
    assert torch.equal(results[0], results[1])
    assert not torch.allclose(results[0], results[2])


def test_eval_is_a_function():
    cfg = preset("original", dropout=0.3)
    model = network(cfg)
    assert torch.equal(model(**inputs(cfg)).hidden, model(**inputs(cfg)).hidden)
    without = network(preset("original"))
    assert isinstance(without, iso.nn.Transformer)
    assert close(model(**inputs(cfg)).hidden, without(**inputs(cfg)).hidden)


def test_no_dropout_module_hides_in_the_network():
    """There is one dropout; `nn.Dropout` modules would be a second way."""
    model = network(preset("original", dropout=0.3))
    assert not [m for m in model.modules() if isinstance(m, nn.Dropout)]
