"""Numbers of the chapter, in float64: activations, norms, Jacobians, visibility (R8, R12–R14, R21)."""

from __future__ import annotations

import pytest
import torch

from isoform import config
from isoform.config import presets
from isoform.nn.activations import activation
from isoform.nn.norms import Norm
from isoform.visibility import Bidirectional, Causal, Places, Prefix

# u: relu, gelu, its derivative, gelu_tanh, silu, its derivative
ACTIVATIONS = {
    -3.0: (0.0, -0.00404969409489031, -0.01194564720418392, -0.0036373920817729943, -0.14227761953270035),
    -1.0: (0.0, -0.15865525393145707, -0.08331547058768629, -0.15880800939172324, -0.2689414213699951),
    0.5: (0.5, 0.34573123063700656, 0.8674951246561629, 0.34571400982514394, 0.3112296656009273),
    3.0: (3.0, 2.99595030590511, 1.011945647204184, 2.996362607918227, 2.8577223804673),
}


@pytest.mark.parametrize("u", ACTIVATIONS)
def test_activations(u: float) -> None:
    """R8: exact GELU, its derivative and the tanh approximation are three different things."""
    relu, gelu, slope, tanh, silu = ACTIVATIONS[u]
    x = torch.tensor(u, dtype=torch.float64, requires_grad=True)
    y = activation("gelu")(x)
    (grad,) = torch.autograd.grad(y, x)
    found = [float(f) for f in (activation("relu")(x).detach(), y.detach(), grad)]
    found += [float(activation(name)(x).detach()) for name in ("gelu_tanh", "silu")]
    assert found == pytest.approx([relu, gelu, slope, tanh, silu], abs=1e-12)


def made(kind: str, eps: float, width: int) -> Norm:
    cfg = config.Norm(kind=kind, eps=eps, bias=kind == "layer")  # pyright: ignore
    return Norm(cfg, width).double()


def test_norms_and_their_jacobians() -> None:
    """R12–R14: population variance, eps inside the root; J of LayerNorm sends (1, 1, 1) to zero."""
    x = torch.tensor([1.0, 2, 3], dtype=torch.float64)
    layer, rms = made("layer", 1e-5, 3), made("rms", 1e-5, 3)
    assert layer(x).tolist() == pytest.approx([-1.2247356859083902, 0, 1.2247356859083902], abs=1e-12)
    assert layer(x + 10).tolist() == pytest.approx(layer(x).tolist(), abs=1e-12)
    assert rms(x).tolist() == pytest.approx(
        [0.4629095539120194, 0.9258191078240388, 1.3887286617360581], abs=1e-12
    )
    assert rms(x + 10).tolist() == pytest.approx(
        [0.9145520609226523, 0.9976931573701662, 1.08083425381768], abs=1e-12
    )
    jacobian = torch.autograd.functional.jacobian(layer, x)
    assert float(jacobian[0, 1]) == pytest.approx(-0.4082452286361299, abs=1e-12)  # pyright: ignore
    assert (jacobian @ torch.ones(3, dtype=torch.float64)).abs().max() < 1e-12  # pyright: ignore
    of_rms = torch.autograd.functional.jacobian(rms, x)
    assert float(of_rms[0, 1]) == pytest.approx(-0.06612979456644298, abs=1e-12)  # pyright: ignore


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norms_are_finite_on_constant_and_tiny_variance(kind: str) -> None:
    for x in (torch.full((4,), 3.0), torch.zeros(4), 1 + 1e-7 * torch.arange(4.0)):
        x = x.double().requires_grad_()
        y = made(kind, 1e-5, 4)(x)
        (grad,) = torch.autograd.grad(y.square().sum(), x)
        assert y.isfinite().all() and grad.isfinite().all()


def test_visibility_matrices() -> None:
    """(6.32), (6.33) and exercise 6.7."""
    assert Bidirectional().on(4).matrix[0].int().tolist() == [[1] * 4] * 4
    assert Causal().on(4).matrix[0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    six = Prefix().on(Places.range(6, prefix=3)).matrix[0].int().tolist()
    assert six == [[1, 1, 1, 0, 0, 0]] * 3 + [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0], [1] * 6]
    assert Causal().on(4).is_causal() and not Bidirectional().on(4).is_causal()


def test_truth_direction() -> None:
    """R22: allowed, forbidden and additive say the same rule in opposite directions."""
    allowed = Causal().on(3)
    assert torch.equal(allowed.forbidden().matrix, ~allowed.matrix)
    assert torch.equal(allowed.additive(torch.float64).allowed().matrix, allowed.matrix)
    assert torch.equal(allowed.multihead(2), ~allowed.matrix[0])


def test_original_preset() -> None:
    """R16."""
    cfg = presets.original(100)
    assert cfg.encoder is not None and cfg.decoder is not None
    assert (cfg.d_model, cfg.encoder.n_layers, cfg.decoder.n_layers) == (512, 6, 6)
    assert cfg.decoder.layer.placement == "post" and cfg.decoder.final_norm is None
