"""Inverted dropout (R33)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F


def dropout(x: Float[Tensor, "*shape"], share: float, training: bool) -> Float[Tensor, "*shape"]:
    """Zero a share of the elements in training and divide the others by (1 - share); in eval, x itself.

    On the CPU PyTorch draws one float an element, which costs as much as a matrix product with 128 columns.
    Four elements share one 64-bit draw here, so a share is a multiple of 1/65536; the factor stays exact.
    """
    if not training or share == 0.0:
        return x
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, share, True)
    return x * _factors(x, share)


def _factors(x: Tensor, share: float) -> Tensor:
    draws = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    # Written as numbers of x at once: widening truth values takes several times as long.
    kept = torch.empty(x.numel(), dtype=x.dtype)
    torch.ge(draws.view(torch.int16)[: x.numel()], round(share * 65536) - 32768, out=kept)
    return kept.mul_(1.0 / (1.0 - share)).view(x.shape)
