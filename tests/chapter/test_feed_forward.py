"""R6–R9: feed-forward networks and activations (6.3–6.10)."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from isoform import config
from isoform.nn import jacobians
from isoform.nn.activations import ACTIVATIONS, activation
from isoform.nn.feed_forward import Gated, TwoLayer, feed_forward
from networks import shake
from tolerances import close, off

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())["activations"]
D, F = 5, 7


def two_layer(name="relu", *, bias=True, width=F, **more):
    cfg = config.TwoLayer(width=width, activation=name, bias_up=bias, bias_down=bias, **more)
    return shake(feed_forward(cfg, D))


def gated(name, *, biases=(True, True, True), width=F):
    gate, up, down = biases
    cfg = config.Gated(width=width, activation=name, bias_gate=gate, bias_up=up, bias_down=down)
    return shake(feed_forward(cfg, D))


@pytest.fixture
def x():
    return torch.randn(2, 3, D, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


# --- R6, R8: activations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("point", GOLDEN, ids=lambda p: str(p["u"]))
@pytest.mark.parametrize("name", ["relu", "gelu", "gelu_tanh", "silu", "sigmoid"])
def test_activation_values_are_the_chapters(point, name):
    u = torch.tensor(point["u"], dtype=torch.float64)
    assert abs(activation(name)(u).item() - point[name]) < 1e-15


@pytest.mark.parametrize("point", GOLDEN, ids=lambda p: str(p["u"]))
@pytest.mark.parametrize("name", ["gelu", "silu"])
def test_derivatives_by_hand_and_automatic_are_the_chapters(point, name):
    u = torch.tensor(point["u"], dtype=torch.float64, requires_grad=True)
    (automatic,) = torch.autograd.grad(activation(name)(u), u)
    by_hand = {"gelu": jacobians.gelu_derivative, "silu": jacobians.silu_derivative}[name](u.detach())
    assert abs(automatic.item() - point[f"{name}_derivative"]) < 1e-15
    assert abs(by_hand.item() - point[f"{name}_derivative"]) < 1e-15


def test_relu_has_derivative_zero_at_zero():
    u = torch.tensor([-2.0, 0.0, 3.0], dtype=torch.float64, requires_grad=True)
    (automatic,) = torch.autograd.grad(activation("relu")(u).sum(), u)
    assert automatic.tolist() == [0.0, 0.0, 1.0] == jacobians.relu_derivative(u.detach()).tolist()


def test_the_three_gelus_differ():
    u = torch.linspace(-3, 3, 13, dtype=torch.float64)
    exact, tanh, quick = (activation(name)(u) for name in ("gelu", "gelu_tanh", "quick_gelu"))
    assert 1e-4 < (exact - tanh).abs().max() < 1e-3  # (6.6) against (6.8)
    assert (exact - quick).abs().max() > 1e-2
    assert torch.equal(quick, u / (1 + torch.exp(-1.702 * u))) or close(
        quick, u / (1 + torch.exp(-1.702 * u))
    )


FORMULAS = {
    "identity": lambda u: u,
    "relu": lambda u: max(0.0, u),
    "relu_squared": lambda u: max(0.0, u) ** 2,
    "gelu": lambda u: u * 0.5 * math.erfc(-u / math.sqrt(2)),
    "gelu_tanh": lambda u: u / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3))),
    "quick_gelu": lambda u: u / (1 + math.exp(-1.702 * u)),
    "silu": lambda u: u / (1 + math.exp(-u)),
    "sigmoid": lambda u: 1 / (1 + math.exp(-u)),
    "tanh": math.tanh,
    "elu": lambda u: u if u > 0 else math.expm1(u),
    "leaky_relu": lambda u: u if u > 0 else 0.01 * u,
    "softplus": lambda u: math.log1p(math.exp(u)),
    "mish": lambda u: u * math.tanh(math.log1p(math.exp(u))),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_is_its_formula(name):
    points = torch.linspace(-3, 3, 25, dtype=torch.float64)
    expected = torch.tensor([FORMULAS[name](u) for u in points.tolist()], dtype=torch.float64)
    assert close(activation(name)(points), expected)


# --- R6, R7: two layers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_two_layer_formula(x, bias):
    net = two_layer("gelu", bias=bias)
    hidden = x @ net.up.weight.T + (net.up.bias if bias else 0)
    hidden = hidden * 0.5 * torch.erfc(-hidden / math.sqrt(2))
    assert close(net(x), hidden @ net.down.weight.T + (net.down.bias if bias else 0))
    assert sum(p.numel() for p in net.parameters()) == 2 * D * F + (F + D if bias else 0)


def test_each_bias_is_its_own_choice():
    cfg = config.TwoLayer(width=F, activation="relu", bias_up=True, bias_down=False)
    net = TwoLayer(cfg, D)
    assert net.up.bias is not None
    assert net.down.bias is None


def test_width_is_free(x):
    for width in (1, 3, 11):
        assert two_layer(width=width)(x).shape == x.shape


def test_without_activation_two_maps_are_one(x):
    """(6.4)"""
    net = two_layer("identity")
    weight = net.up.weight.T @ net.down.weight.T
    bias = net.up.bias @ net.down.weight.T + net.down.bias
    assert close(net(x), x @ weight + bias)
    assert off(two_layer("relu")(x), x @ weight + bias) > 0.01


def test_sum_over_units(x):
    """(6.5)"""
    net = two_layer("silu", bias=False)
    units = [activation("silu")(x @ net.up.weight[j])[..., None] * net.down.weight[:, j] for j in range(F)]
    assert close(net(x), torch.stack(units).sum(0))


def test_relu_region_jacobian(x):
    """Exercise 6.1: within one activation region the Jacobian is (W1 D W2)ᵀ."""
    net, point = two_layer("relu"), x[0, 0]
    open_units = (point @ net.up.weight.T + net.up.bias > 0).double()
    assert 0 < open_units.sum() < F
    expected = (net.up.weight.T @ torch.diag(open_units) @ net.down.weight.T).T
    assert close(torch.autograd.functional.jacobian(net, point), expected)


# --- R9: gates --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sigmoid", "gelu", "gelu_tanh", "silu", "relu", "identity"])
@pytest.mark.parametrize(
    "biases", [(False, False, False), (True, True, True), (True, False, True), (False, True, False)]
)
def test_gated_formula(x, name, biases):
    """(6.9): GLU, GEGLU in both forms, SwiGLU, ReGLU, bilinear; the activation is on the gate branch only."""
    net = gated(name, biases=biases)
    packed = net.gate_up
    gate, up = (
        x @ packed.part(part).T + (packed.part_bias(part) if part in packed.biased else 0)
        for part in ("gate", "up")
    )
    down = net.down.bias if biases[2] else 0
    assert close(net(x), (activation(name)(gate) * up) @ net.down.weight.T + down)
    assert packed.biased == tuple(part for part, has in zip(("gate", "up"), biases[:2], strict=True) if has)


def test_gate_and_content_are_independent_parameters(x):
    """Packed or not: a change of one branch's rows leaves the other branch as it is (R9)."""
    net = gated("silu")
    gate, up = (part.clone() for part in net.gate_up.project(x))
    with torch.no_grad():
        net.gate_up.part("gate").add_(1.0)
        net.gate_up.part_bias("gate").add_(1.0)
    changed_gate, changed_up = net.gate_up.project(x)
    assert torch.equal(changed_up, up)
    assert off(changed_gate, gate) > 0.1


def test_gated_differential():
    """(6.10): d[g(a) b] = b g'(a) da + g(a) db, and a SiLU gate can be negative."""
    a = torch.linspace(-3, 3, 7, dtype=torch.float64, requires_grad=True)
    b = torch.linspace(2, -1, 7, dtype=torch.float64, requires_grad=True)
    silu = activation("silu")
    da, db = torch.autograd.grad((silu(a) * b).sum(), (a, b))
    expected = jacobians.gated_differential(
        silu(a).detach(), jacobians.silu_derivative(a.detach()), b.detach()
    )
    assert close(da, expected[0])
    assert close(db, expected[1])
    assert (silu(a) < 0).any()


@pytest.mark.parametrize("net", [two_layer("gelu"), gated("silu")], ids=["two_layer", "gated"])
def test_the_same_map_at_every_position(x, net):
    alone = torch.stack([torch.stack([net(x[b, t]) for t in range(3)]) for b in range(2)])
    assert close(net(x), alone)


def test_gated_has_three_matrices():
    """6.2: 3 d f parameters without biases, against 2 d f."""
    net = gated("silu", biases=(False, False, False))
    assert isinstance(net, Gated)
    assert sum(p.numel() for p in net.parameters()) == 3 * D * F
