"""A router and its experts: Σ over the chosen of weight · expert(x)."""

from __future__ import annotations

import pytest
import torch

from isoform import config
from isoform.nn import capture
from isoform.nn.experts import Experts
from networks import batch, network, preset, shake
from tolerances import close, off

D, F, E = 10, 7, 4
ORDERS = [
    "softmax_then_top_k",
    "softmax_then_top_k_renormalised",
    "top_k_then_softmax",
    "sigmoid_then_top_k",
    "sigmoid_then_top_k_renormalised",
]
GATED = config.Gated(width=F, activation="silu", bias_gate=True, bias_up=True, bias_down=True)
PLAIN = config.TwoLayer(width=F, activation="gelu", bias_up=True, bias_down=True)


def experts(**settings):
    base = {
        "n_experts": E,
        "top_k": 2,
        "expert": GATED,
        "router_bias": True,
        "router_order": "softmax_then_top_k",
        "router_scale": 1.0,
    }
    made = shake(Experts(config.Experts(**{**base, **settings}), D))
    assert isinstance(made, Experts)
    return made.eval()


def states(*shape, seed=0):
    return torch.randn(*shape, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def one_expert(m, x, e):
    up = m.up[e]
    if m.gated:
        gate, content = x @ up[:F].T, x @ up[F:].T
        gate = gate if m.gate_bias is None else gate + m.gate_bias[e]
        content = content if m.up_bias is None else content + m.up_bias[e]
        hidden = gate * gate.sigmoid() * content
    else:
        hidden = torch.nn.functional.gelu(x @ up.T + (0 if m.up_bias is None else m.up_bias[e]))
    return hidden @ m.down[e].T + (0 if m.down_bias is None else m.down_bias[e])


def shares(m, x):
    """The weight of each expert for one token, by the order's own words."""
    scores = x @ m.router.scores.weight.T + (0 if m.router.scores.bias is None else m.router.scores.bias)
    k, order = m.cfg.top_k, m.cfg.router_order
    chosen = scores.argsort(descending=True)[:k]
    if order == "top_k_then_softmax":
        weights = scores[chosen].exp() / scores[chosen].exp().sum()
    else:
        every = scores.sigmoid() if order.startswith("sigmoid") else scores.exp() / scores.exp().sum()
        weights = every[chosen]
        if order.endswith("renormalised"):
            weights = weights / weights.sum()
    return {int(e): w * m.cfg.router_scale for e, w in zip(chosen, weights, strict=True)}


@pytest.mark.parametrize("expert", [GATED, PLAIN], ids=["gated", "two layers"])
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("order", ORDERS)
def test_formula(order, k, expert):
    m, x = experts(router_order=order, top_k=k, expert=expert, router_scale=2.5), states(2, 5)
    found = m(x)
    for place in ((0, 0), (0, 3), (1, 1), (1, 4)):
        token = x[place]
        expected = sum(weight * one_expert(m, token, e) for e, weight in shares(m, token).items())
        assert close(found[place], expected)


@pytest.mark.parametrize("name", ["bias_gate", "bias_up", "bias_down"])
def test_each_bias_is_its_own(name):
    m, x = experts(expert=GATED.replace(**{name: False})), states(1, 6)
    parameter = {"bias_gate": "gate_bias", "bias_up": "up_bias", "bias_down": "down_bias"}[name]
    assert getattr(m, parameter) is None
    token = x[0, 2]
    assert close(m(x)[0, 2], sum(w * one_expert(m, token, e) for e, w in shares(m, token).items()))


def test_two_orders_are_one_function_and_the_others_are_not():
    x = states(3, 4)
    found = {order: experts(router_order=order)(x) for order in ORDERS}
    assert close(found["top_k_then_softmax"], found["softmax_then_top_k_renormalised"])
    for a, b in ((0, 1), (0, 3), (3, 4), (1, 4)):
        assert off(found[ORDERS[a]], found[ORDERS[b]]) > 1e-3


def test_tokens_do_not_see_each_other():
    """Grouping by expert is bookkeeping: every token alone gives what it gives among others."""
    m, x = experts(), states(2, 5)
    alone = torch.stack([m(token[None])[0] for token in x.reshape(-1, D)]).view(2, 5, D)
    assert close(m(x), alone)


def test_only_chosen_experts_get_a_gradient():
    m, x = experts(top_k=1), states(1, 1)
    chosen = next(iter(shares(m, x[0, 0])))
    m(x).square().sum().backward()
    reached = [e for e in range(E) if m.up.grad[e].abs().sum() > 0]
    assert reached == [chosen]
    assert m.router.scores.weight.grad.abs().max() > 0  # through the weight of the choice


def test_gradients_are_those_of_the_formula():
    m, x = experts(), states(1, 4).requires_grad_()
    expected = sum((w * one_expert(m, token, e)).sum() for token in x[0] for e, w in shares(m, token).items())
    mine = torch.autograd.grad(m(x).sum(), [x, *m.parameters()])
    theirs = torch.autograd.grad(expected, [x, *m.parameters()])
    assert all(close(a, b) for a, b in zip(mine, theirs, strict=True))


def test_router_scores_can_be_replaced_and_decide():
    model = network(preset("mixtral", n_layers=1))
    path = "decoder.layers.0.feed_forward.body.router.router"
    fixed = torch.tensor([0.0, 9.0, 8.0, 0.0], dtype=torch.float64)
    with capture(
        model, "decoder.layers.0.feed_forward.increment", replace={path: lambda s: fixed.expand_as(s)}
    ) as seen:
        model(batch())
    body = model.decoder.layers[0].feed_forward.body
    with capture(model, "decoder.layers.0.feed_forward.normalised") as inputs:
        model(batch())
    x = inputs["decoder.layers.0.feed_forward.normalised"].flatten(0, 1)
    weights = fixed[1:3].softmax(-1)
    expected = weights[0] * body._expert(x, 1) + weights[1] * body._expert(x, 2)
    assert close(seen["decoder.layers.0.feed_forward.increment"].flatten(0, 1), expected)


def test_load_balance_is_the_published_loss():
    """coefficient · E · Σ f_e P_e (Fedus et al. 2021, eq. 4); in training alone; one when all are alike."""
    m, x = experts(load_balance=0.25, top_k=1), states(3, 5)
    m(x)
    assert m.router.balance(None) is None
    m.train()(x)
    tokens = x.reshape(-1, D)
    scores = tokens @ m.router.scores.weight.T + m.router.scores.bias
    share = torch.stack([(scores.argmax(-1) == e).double().mean() for e in range(E)])
    found = m.router.balance(None)
    assert close(found, 0.25 * E * (share * scores.softmax(-1).mean(0)).sum())
    assert found.requires_grad and m.router.balance(None) is None
    # Padding is no token.
    real = torch.ones(3, 5, dtype=torch.bool)
    real[1, 3:] = real[2, 1:] = False
    m(x)
    found, scores = m.router.balance(real), scores[real.flatten()]
    share = torch.stack([(scores.argmax(-1) == e).double().mean() for e in range(E)])
    assert close(found, 0.25 * E * (share * scores.softmax(-1).mean(0)).sum())


def test_half_precision_routes_in_float32():
    m, x = experts(), states(2, 6)
    exact, out = m(x), m.bfloat16()(x.bfloat16())
    assert out.dtype == torch.bfloat16
    assert off(out, exact) < 0.1


def test_experts_drop_hidden_units_in_training_alone():
    m, x = experts(expert=GATED.replace(dropout=0.5)), states(2, 6)
    still = m(x)
    assert torch.equal(m(x), still)
    torch.manual_seed(0)
    assert off(m.train()(x), still) > 0.01
