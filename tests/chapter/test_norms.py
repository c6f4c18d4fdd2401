"""R11–R15: residuals, LayerNorm, RMSNorm, their Jacobians and where they stand (6.11–6.23)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.autograd.functional import jacobian

from isoform import config
from isoform.nn import jacobians
from isoform.nn.layer import Residual
from isoform.nn.norms import Norm
from networks import attention, shake
from tolerances import TOLERANCE, close, off

FILE = json.loads((Path(__file__).parent / "golden.json").read_text())
GOLDEN, DEPTH10 = FILE["norms"], FILE["residual_depth10"]
HAND = {"layer": jacobians.layer_norm_jacobian, "rms": jacobians.rms_norm_jacobian}
HAND_GRADIENT = {"layer": jacobians.layer_norm_gradient, "rms": jacobians.rms_norm_gradient}


def norm(kind, width, eps=1e-5, **more):
    return Norm(
        config.Norm(kind=kind, eps=eps, bias=more.pop("bias", kind == "layer"), **more), width
    ).double()


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "kind", "x", "eps"),
    [
        ("layer_norm_1_3_eps0", "layer", (1, 3), 0.0),
        ("rms_norm_1_3_eps0", "rms", (1, 3), 0.0),
        ("layer_norm_123_eps0", "layer", (1, 2, 3), 0.0),
        ("layer_norm_123_eps1e-5", "layer", (1, 2, 3), 1e-5),
        ("layer_norm_11_12_13_eps1e-5", "layer", (11, 12, 13), 1e-5),
        ("rms_norm_123_eps1e-5", "rms", (1, 2, 3), 1e-5),
        ("rms_norm_11_12_13_eps1e-5", "rms", (11, 12, 13), 1e-5),
    ],
)
def test_values_are_the_chapters(name, kind, x, eps):
    """Exercise 6.5."""
    assert off(norm(kind, len(x), eps)(vector(*x)), vector(*GOLDEN[name])) < 1e-14


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_jacobians_are_the_chapters(kind):
    """(6.16), (6.19): by hand, automatic, and golden."""
    x, ones = vector(1, 2, 3), torch.ones(3, dtype=torch.float64)
    golden = torch.tensor(GOLDEN[f"{kind}_norm_jacobian_123_eps1e-5"], dtype=torch.float64)
    assert off(HAND[kind](x, ones, 1e-5), golden) < 1e-14
    assert off(jacobian(norm(kind, 3), x), golden) < 1e-14


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_jacobian_and_input_gradient_by_hand(kind, offset):
    """(6.16), (6.17), (6.19), with gains; `gain_offset` 1 multiplies by 1 + w (R13)."""
    module = shake(norm(kind, 7, 1e-3, gain_offset=offset))
    generator = torch.Generator().manual_seed(1)
    x, upstream = torch.randn(2, 7, dtype=torch.float64, generator=generator)
    gain = (module.weight + offset).detach()
    automatic = jacobian(module, x)
    assert close(automatic, HAND[kind](x, gain, 1e-3))
    assert close(automatic.T @ upstream, HAND_GRADIENT[kind](x, upstream, gain, 1e-3))
    x.requires_grad_()
    module(x).backward(upstream)
    normal = (
        (x - x.mean() if kind == "layer" else x)
        / torch.sqrt((x.var(correction=0) if kind == "layer" else x.square().mean()) + 1e-3)
    ).detach()
    assert close(module.weight.grad, upstream * normal)
    if module.bias is not None:
        assert close(module.bias.grad, upstream)


def test_layer_norm_jacobian_maps_ones_to_zero():
    """Exercise 6.4: shifting all features changes nothing; RMSNorm does see it (R13)."""
    x, ones = vector(1, 2, 4, -3), torch.ones(4, dtype=torch.float64)
    gain = vector(0.5, 2, -1, 3)
    assert (HAND["layer"](x, gain, 1e-5) @ ones).abs().max() < 1e-15
    assert (HAND["rms"](x, gain, 1e-5) @ ones).abs().max() > 0.1
    assert close(norm("layer", 4)(x + 10), norm("layer", 4)(x))
    assert off(norm("rms", 4)(x + 10), norm("rms", 4)(x)) > 0.1


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_population_variance_and_eps_inside_the_root(kind):
    """R12: not divided by d - 1, eps not added to the deviation: with eps near the variance all differ."""
    x, eps = vector(0.3, -0.1, 0.2), 0.05
    c = x - x.mean() if kind == "layer" else x
    right = c / torch.sqrt(c.square().mean() + eps)
    assert close(norm(kind, 3, eps)(x), right)
    for wrong in (c / torch.sqrt(c.square().sum() / 2 + eps), c / (c.square().mean().sqrt() + eps)):
        assert off(wrong, right) > 0.01


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_positive_scaling_is_nearly_an_invariance_and_negative_scaling_flips(kind):
    """R14."""
    module, x = norm(kind, 5, 1e-5), vector(1, -2, 0.5, 3, 0.2)
    assert 0 < off(module(3 * x), module(x)) < 1e-4
    assert off(norm(kind, 5, 1e-5)(1e-3 * x), module(x)) > 0.01
    assert close(module(-x), -module(x))


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_statistics_never_cross_batch_or_time(kind):
    """R12."""
    module = shake(norm(kind, 6))
    x = torch.randn(
        3, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True
    )
    alone = torch.stack([torch.stack([module(x[b, t]) for t in range(4)]) for b in range(3)])
    assert close(module(x), alone)
    (gradient,) = torch.autograd.grad(module(x)[1, 2].square().sum(), x)
    gradient[1, 2] = 0
    assert gradient.abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize(
    "x", [[3.0] * 6, [0.0] * 6, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0 + 2.0**-7], [1e-6, -1e-6, 2e-6, 0, 0, 0]],
    ids=["constant", "zero", "nearly constant", "tiny"],
)  # fmt: skip
def test_constant_and_tiny_variance_vectors_are_finite(dtype, kind, x):
    """R41, R14: forward and backward."""
    module = norm(kind, 6).to(dtype)
    point = torch.tensor(x, dtype=dtype, requires_grad=True)
    out = module(point)
    out.sum().backward()
    assert out.isfinite().all()
    assert point.grad is not None and point.grad.isfinite().all()
    if kind == "layer" and len(set(x)) == 1:
        assert out.abs().max() == 0  # β is zero here


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_half_precision_rms(dtype, after, offset):
    """Statistics in float32; the gain before or after rounding, as configured; near the float64 value."""
    cfg = config.Norm(kind="rms", eps=1e-6, bias=False, gain_offset=offset, gain_after_cast=after)
    module = shake(Norm(cfg, 16))
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(2)).to(dtype)
    exact = module(x.double())
    module.to(dtype)
    assert off(module(x), exact) < TOLERANCE[dtype]
    gain = module.weight.float() + offset
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    expected = (wide * gain).to(dtype) if after else wide.to(dtype) * gain.to(dtype)
    assert torch.equal(module(x), expected)


def test_gain_and_bias_are_options():
    assert norm("layer", 3, bias=False).bias is None
    assert norm("layer", 3, bias=False, gain=False).weight is None
    assert norm("rms", 3).bias is None


# --- R11, R15: residuals and placement --------------------------------------------------------------------


class Map(torch.nn.Module):
    """A body with a known Jacobian."""

    def __init__(self, width):
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.empty(width, width, dtype=torch.float64))

    def forward(self, x):
        return torch.tanh(x @ self.matrix.T)


def residual(placement, *, width=4, **more):
    cfg = config.Layer(
        placement=placement,
        residual="sequential",
        norm=config.Norm(kind="layer", eps=1e-3, bias=True),
        attention=attention(),
        feed_forward=config.TwoLayer(width=3, activation="relu", bias_up=True, bias_down=True),
        **more,
    )
    return shake(Residual(cfg, width, Map(width)))


PLACES = {
    "post": lambda m, x: m.after_sum(x + m.body(x)),  # (6.20)
    "pre": lambda m, x: x + m.body(m.before(x)),  # (6.21)
    "sandwich": lambda m, x: x + m.after_body(m.body(m.before(x))),
    "res_post": lambda m, x: x + m.after_body(m.body(x)),
}


@pytest.mark.parametrize("placement", PLACES)
def test_placement_formulas(placement):
    module, x = residual(placement), torch.randn(2, 3, 4, dtype=torch.float64)
    assert close(module(x), PLACES[placement](module, x))


def test_placements_are_different_functions():
    """R15: the same parameters, other places."""
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    post, pre = residual("post"), residual("pre")
    pre.before, pre.body = post.after_sum, post.body
    assert off(pre(x), post(x)) > 0.1


def test_post_and_pre_jacobians():
    """(6.22), (6.23)."""
    x = vector(0.3, -1.2, 0.8, 0.1)
    post, pre = residual("post"), residual("pre")
    inner = jacobian(post.after_sum, x + post.body(x))
    assert close(jacobian(post, x), jacobians.post_norm_jacobian(inner, jacobian(post.body, x)))
    inner = jacobian(pre.before, x)
    assert close(jacobian(pre, x), jacobians.pre_norm_jacobian(inner, jacobian(pre.body, pre.before(x))))


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_residual_scale_acts_forward_and_backward(scale):
    """(6.11), (6.12), R11: x + αF(x), and I + αJ."""
    module, x = residual("pre", residual_scale=scale), vector(0.3, -1.2, 0.8, 0.1)
    increment = module.body(module.before(x))
    assert close(module(x), x + scale * increment)
    body = jacobian(lambda y: module.body(module.before(y)), x)
    assert close(jacobian(module, x), torch.eye(4, dtype=torch.float64) + scale * body)


@pytest.mark.parametrize("a", [0.1, -0.1, -1.0])
def test_depth_ten_derivative(a):
    """Exercise 6.6: (1 + a)^10; an identity path alone does not keep a gradient alive."""
    x = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    y = x
    for _ in range(10):
        y = y + a * y
    (derivative,) = torch.autograd.grad(y, x)
    assert abs(derivative.item() - DEPTH10[f"a={a:g}"]) < 1e-12


def test_normalised_residual_source():
    """BLOOM's variant: the increment is added to the normalised stream."""
    module = residual("pre", residual_source="normalised")
    x = torch.randn(2, 4, dtype=torch.float64)
    assert close(module(x), module.before(x) + module.body(module.before(x)))
