"""Each form computes what its numbers stand for, through the private operator and without it."""

from __future__ import annotations

import pytest
import torch

from isoform.nn import fbgemm, products
from isoform.nn.products import FORMS, product, restored, rounded

BOUNDS = {"float32": 1e-5, "bfloat16": 1e-2, "int8": 1e-5, "int8_dynamic": 4e-2}


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return 2 * torch.rand(shape, generator=torch.Generator().manual_seed(seed)) - 1


@pytest.fixture(params=["operators", "wide registers", "fallback"])
def operators(request, monkeypatch):
    """With PyTorch's private operators, those chosen with AVX-512, and as if they had vanished."""
    if request.param == "wide registers":
        monkeypatch.setattr(products, "_wide_registers", lambda: True)
        monkeypatch.setattr(products, "SMALL", 1)
    if request.param == "fallback":

        def gone(*given):
            raise AttributeError

        monkeypatch.setattr(fbgemm, "pack_float16", gone)

        for name in ("_pack_float32", "_multiplies_bfloat16"):
            monkeypatch.setattr(products, name, gone)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [(1,), (2, 3), (5, 9)])
@pytest.mark.parametrize("biased", [True, False])
def test_what_the_numbers_stand_for(operators, form, rows, biased):
    weight, x = drawn(24, 40) * torch.linspace(0.1, 3, 24)[:, None], drawn(*rows, 40, seed=1)
    bias = drawn(24, seed=2) if biased else None
    with torch.inference_mode():
        made = product(form, weight, bias)
        found = made(x)
        expected = torch.nn.functional.linear(x, made.dense(), bias)
    assert found.shape == expected.shape and found.dtype == x.dtype
    assert (found - expected).norm() <= BOUNDS[form] * expected.norm()
    assert (made.dense() - weight).norm() <= 1e-2 * weight.norm()


@pytest.mark.parametrize("form", FORMS)
def test_what_is_stored_makes_it_again(form):
    weight, bias, x = drawn(6, 8), drawn(6, seed=1), drawn(3, 8, seed=2)
    with torch.inference_mode():
        made = product(form, weight, bias)
        torch.testing.assert_close(restored(form, made.stored(), bias)(x), made(x), rtol=0, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_does_not_depend_on_a_larger_one(form):
    made, x = product(form, drawn(6, 8), drawn(6, seed=1)), drawn(2, 8, seed=2)
    far = torch.stack([x[0], 1e4 * x[1]])
    with torch.inference_mode():
        torch.testing.assert_close(made(far)[0], made(x)[0], rtol=1e-6, atol=1e-6)


def test_scales_are_of_a_channel_and_numbers_fit():
    weight = torch.tensor([[1.0, -0.5, 0.25], [1e-3, 0.0, -2e-3], [0.0, 0.0, 0.0]])
    numbers, scales = rounded(weight)
    assert numbers.dtype == torch.int8 and int(numbers.abs().max()) <= 127
    assert float(scales[0]) > 100 * float(scales[1])
    torch.testing.assert_close(numbers * scales[:, None], weight, rtol=0, atol=5e-3)


def test_other_float_types_are_computed_plainly():
    made = product("float32", drawn(6, 8).double(), None)
    x = drawn(2, 8, seed=1).double()
    assert made(x).dtype == torch.float64


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e6, 1e30])
def test_halves_hold_every_bfloat16_that_counts(size):
    """Weights of any size, with elements 2^-21 of the largest."""
    weight = (size * drawn(6, 8) * 2.0 ** -torch.arange(0, 24, 3)).bfloat16()
    bias, x = size * drawn(6, seed=1), drawn(3, 8, seed=2) * 2.0 ** torch.arange(0, 24, 3)
    made = fbgemm.halves(weight, bias)
    if fbgemm.attempt(fbgemm.pack_float16, torch.ones(2, 2)) is None:
        pytest.skip("no FBGEMM here")
    if 1e-18 < size < 1e18:
        assert made is not None
        expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
        torch.testing.assert_close(made(x).double() / size, expected / size, rtol=1e-5, atol=1e-5)
    else:
        assert made is None


def test_halves_refuse_what_is_not_finite():
    assert fbgemm.halves(torch.tensor([[1.0, torch.inf]]).bfloat16(), None) is None
