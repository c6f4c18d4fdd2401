"""Derivatives of a number by tensors, some of which it may not depend on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def derivatives(value: Tensor, leaves: Sequence[Tensor], weight: Tensor | None = None) -> list[Tensor | None]:
    """The derivative by each leaf; None where the value does not depend on it. The graph is kept.

    Args:
        value: one number; with ``weight`` as many as that has, of which the weighted sum is meant.
        leaves: by what.
        weight: of each number.
    """
    return list(torch.autograd.grad(value, leaves, weight, retain_graph=True, allow_unused=True))
