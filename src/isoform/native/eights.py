"""Products of whole numbers of 8 bits: how weights lie for ``eights.h``, and how inputs are rounded.

Sums of such products are whole too, so that the order they are added in, and the instruction, change nothing.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int8
from torch import Tensor
from torch.nn import functional as F

BLOCK = 16
"""Outputs side by side."""
WIDEST = 2**16
"""Inputs whose products of 8 bits, one factor shifted to 0 … 255, certainly fit 32."""


def groups_of(width: int) -> int:
    """Groups of four inputs, in pairs."""
    return (width + 7) // 8 * 2


def laid_out(numbers: Int8[Tensor, "out width"]) -> Int8[Tensor, "blocks bytes"]:
    """In blocks of 16 outputs: the sum of each one's weights in 32 bits, then ``[groups, 16, 4]``."""
    n, width = numbers.shape
    groups, blocks = groups_of(width), -(-n // BLOCK)
    whole = F.pad(numbers, (0, 4 * groups - width, 0, blocks * BLOCK - n))
    sums = whole.sum(1, dtype=torch.int32).view(torch.int8).view(blocks, 4 * BLOCK)
    inner = whole.view(blocks, BLOCK, groups, 4).transpose(1, 2).reshape(blocks, -1)
    return torch.cat([sums, inner], 1)


def rounded_rows(
    x: Float[Tensor, "*batch width"],
) -> tuple[Float[Tensor, "*batch width"], Float[Tensor, "*batch 1"]]:
    """Whole numbers from -127 to 127, and a scale a row, which is NaN where the row is not finite."""
    size = x.abs().amax(-1, keepdim=True)
    by = torch.where(size > 0, 127 / size, 0.0)
    odd = (x - x).sum(-1, keepdim=True)
    return (x * by).round_().nan_to_num_(0.0), size / 127 + odd
