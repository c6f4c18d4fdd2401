"""Derivatives of a number by tensors, some of which it may not depend on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def derivatives(value: Tensor, leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """The derivative by each leaf; None where the value does not depend on it. The graph is kept."""
    return list(torch.autograd.grad(value, leaves, retain_graph=True, allow_unused=True))
