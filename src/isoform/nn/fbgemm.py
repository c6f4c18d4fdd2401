"""FBGEMM's products for narrow weights on a CPU. All of its operators that are called, are called here.

PyTorch calls them deprecated. Their successors, for quantized tensors, take 20 to 40 µs more to begin, which
is as long as many products of a step take; where they have vanished, `products` has other ways.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


def attempt(call: Callable[..., Any], *given: Any) -> Any:
    """What a private operator gives; None where it is gone or does not work here."""
    try:
        return call(*given)
    except (AttributeError, RuntimeError, NotImplementedError):
        return None


class Halves:
    """x Wᵀ + b with W in float16 and sums in float32 (FBGEMM): no other kernel of a CPU without units for
    narrower numbers is as fast at any number of rows.

    Args:
        packed: W times a power of two.
        bias: b times it.
        factor: its inverse.
    """

    def __init__(self, packed: Tensor, bias: Tensor | None, factor: float) -> None:
        self._packed, self._bias, self._factor = packed, bias, factor

    def __call__(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch out"]:
        """The product of float32 rows."""
        out = _float16_product(x if x.dim() > 1 else x[None], self._packed, self._bias)
        out = out if x.dim() > 1 else out[0]
        return out if self._factor == 1.0 else out.mul_(self._factor)


def halves(weight: Tensor, bias: Tensor | None) -> Halves | None:
    """The weight in float16; None where that cannot hold it, or the operator is missing.

    Numbers of 8 bits fit: those of a bfloat16 weight are first brought up to the upper end of the range, so
    that what becomes zero is 2^-38 of the largest.
    """
    if weight.device.type != "cpu":
        return None
    wide = weight.float()
    largest = float(wide.abs().max()) if weight.dtype == torch.bfloat16 else 0.0
    power = 2.0 ** (14 - math.frexp(largest)[1]) if largest > 0 and math.isfinite(largest) else 1.0
    if not math.isfinite(largest) or not 2.0**-60 < power < 2.0**60:
        return None
    packed = attempt(pack_float16, wide * power)
    return (
        None
        if packed is None
        else Halves(packed, None if bias is None else bias.float() * power, 1.0 / power)
    )


def pack_float16(weight: Float[Tensor, "out width"]) -> Tensor:
    """The weight in float16, in the order it is multiplied in."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        packed = torch.fbgemm_pack_gemm_matrix_fp16(weight)  # pyright: ignore
        _float16_product(torch.zeros(1, weight.shape[1]), packed, None)  # or say that it cannot
    return packed


def _float16_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.fbgemm_linear_fp16_weight_fp32_activation(x, packed, bias)  # pyright: ignore
