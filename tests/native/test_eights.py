"""Products of whole numbers of 8 bits: machine code gives exactly what layout and rounding stand for."""

from __future__ import annotations

import pytest
import torch

from isoform.native import library
from isoform.native.eights import BLOCK, groups_of, laid_out, rounded_rows
from isoform.nn import products
from isoform.nn.products import Int8Dynamic

needs_compiler = pytest.mark.skipif(library(torch.float32) is None, reason="there is no C++ compiler")


def drawn(*shape: int) -> torch.Tensor:
    """Between -1 and 1, and alike on every machine."""
    count = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float64)
    return (count * 12.9898).sin().mul(43758.5453).frac().float().view(shape)


def weights(n: int, width: int) -> torch.Tensor:
    return (drawn(n, width) * 127.49).round().to(torch.int8)


def test_layout():
    """Every weight lies where it is read; what is beyond the edges is 0, and each block has its sums."""
    numbers = weights(21, 13)
    blocks = laid_out(numbers)
    assert blocks.shape == (2, 4 * BLOCK * (1 + groups_of(13))) and groups_of(13) == 4
    sums = blocks[:, : 4 * BLOCK].contiguous().view(torch.int32).flatten()
    assert sums[:21].tolist() == numbers.sum(1).tolist() and not sums[21:].any()
    inner = blocks[:, 4 * BLOCK :].view(2, 4, BLOCK, 4)
    whole = torch.zeros(32, 16, dtype=torch.int8)
    whole[:21, :13] = numbers
    for n, k in ((0, 0), (5, 7), (16, 12), (20, 3), (31, 15)):
        assert inner[n // BLOCK, k // 4, n % BLOCK, k % 4] == whole[n, k]
    assert int(inner.abs().sum()) == int(numbers.abs().sum())


@needs_compiler
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 13, 29])
@pytest.mark.parametrize(("n", "width"), [(1, 1), (3, 5), (16, 8), (50, 33), (80, 64), (97, 130)])
def test_products(rows, n, width):
    """Ends of blocks, of groups and of rows, with both extremes of what 8 bits hold."""
    x, numbers = drawn(rows, width), weights(n, width)
    x[0, 0], numbers[0, 0], numbers[-1, -1] = 1.0, 127, -127
    if rows > 2:
        x[1] = 0.0
        x[2] *= 1e6
    scale, bias = drawn(n).abs(), drawn(n)
    whole, size = rounded_rows(x)
    expected = (whole.double() @ numbers.double().t()).float() * size * scale + bias
    found = library(torch.float32).eights(x, laid_out(numbers), scale, bias)
    assert ((found - expected).abs() <= 1e-6 * expected.abs().amax(1, keepdim=True)).all()


@needs_compiler
def test_largest_sums():
    """Inputs and weights at the end of their range, of every sign: no pair of products is cut off."""
    for a in (1.0, -1.0):
        for b in (127, -127):
            numbers = torch.full((20, 40), b, dtype=torch.int8)
            found = library(torch.float32).eights(
                torch.full((3, 40), a), laid_out(numbers), torch.ones(20), None
            )
            torch.testing.assert_close(found, torch.full((3, 20), a * b * 40.0), rtol=1e-6, atol=0)


@needs_compiler
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_comes_out_as_nan(odd):
    """In its row and in no other, with the library and without it."""
    x = drawn(3, 9)
    x[1, 4] = odd
    made = Int8Dynamic(weights(5, 9), torch.ones(5), drawn(5))
    found = library(torch.float32).eights(x, made.laid(), torch.ones(5), drawn(5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "loaded", lambda x: None)
        for out in (found, made(x)):
            assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


@needs_compiler
def test_with_the_library_and_without_it():
    x, made = 3 * drawn(2, 5, 37), Int8Dynamic(weights(11, 37), drawn(11).abs(), drawn(11))
    found = library(torch.float32).eights(x, made.laid(), drawn(11).abs(), drawn(11))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "loaded", lambda x: None)
        torch.testing.assert_close(made(x), found, rtol=1e-6, atol=1e-5)


def test_widths_whose_sums_could_overflow_are_left_alone(monkeypatch):
    monkeypatch.setattr(products, "WIDEST", 36)
    assert Int8Dynamic(weights(3, 37), torch.ones(3), None).laid() is None
    assert Int8Dynamic(weights(3, 36), torch.ones(3), None).laid() is not None
