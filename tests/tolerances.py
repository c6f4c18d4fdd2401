"""How far two computations of one function may lie apart, by dtype. Import this instead of choosing a number.

Two orders of summation differ by rounding. A tiny network (3 layers, widths below 64) is 30 to 60 roundings
deep; each is at most u, half a unit in the last place of values near 1, on the scale of the largest value.

* float64 and float32: the worst case of all roundings adding up, ``DEPTH`` · 2u. That is affordable there: a
  wrong formula is off by far more, and every comparison that can be made in float64 is made there.
* float16 and bfloat16: the worst case would say nothing (0.5 in bfloat16). Roundings are independent, so they
  add up like a random walk: √DEPTH · u/√3 is their standard deviation, and 2 √DEPTH · u = 16 u is 3.5 of
  them, for the largest among hundreds of elements (Higham and Mary 2019). Sums inside a product are kept in
  float32 and round once. Measured over ten families and six seeds: at most 7 u.
"""

from __future__ import annotations

import torch
from torch import Tensor

DEPTH = 64

TOLERANCE: dict[torch.dtype, float] = {
    torch.float64: DEPTH * 2.0**-52,  # 1.4e-14: the same terms in another order
    torch.float32: DEPTH * 2.0**-23,  # 7.6e-6
    torch.float16: 2 * DEPTH**0.5 * 2.0**-11,  # 7.8e-3: eleven bits, the leading one included
    torch.bfloat16: 2 * DEPTH**0.5 * 2.0**-8,  # 6.3e-2: eight bits
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
