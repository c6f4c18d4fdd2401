"""How far two computations of one function may lie apart, by dtype. Import this instead of choosing a number.

Two orders of summation differ by rounding: a few dozen roundings, each half a unit in the last place u of
values near 1, partly cancelling. A tiny network (3 layers, widths below 64) is 30 to 60 roundings deep, so the
allowance is 64 u on the scale of the largest value. A wrong formula is off by far more than that in float64,
where every comparison that can be made there is made.
"""

from __future__ import annotations

import torch
from torch import Tensor

DEPTH = 64

TOLERANCE: dict[torch.dtype, float] = {
    torch.float64: DEPTH * 2.0**-52,  # 1.4e-14: the same terms in another order
    torch.float32: DEPTH * 2.0**-23,  # 7.6e-6
    torch.float16: DEPTH * 2.0**-10,  # 6.3e-2: ten fraction bits
    torch.bfloat16: DEPTH * 2.0**-7,  # 5.0e-1: seven fraction bits; only the mean error says more, see `off`
}

PARITY = 1e-10
"""Against another implementation in float64, forward and gradients: what the project promises."""


def off(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected value (at least 1)."""
    assert found.shape == expected.shape, f"{list(found.shape)} against {list(expected.shape)}"
    if found.numel() == 0:
        return 0.0
    found, expected = found.detach().double(), expected.detach().double()
    assert found.isfinite().all(), "not finite"
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))


def close(found: Tensor, expected: Tensor, dtype: torch.dtype = torch.float64) -> bool:
    """Whether two tensors agree within the tolerance of the dtype that the coarser one was computed in."""
    return off(found, expected) <= TOLERANCE[dtype]
