"""The gradient noise scale (McCandlish et al. 2018, appendix A.1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

DECAY = 0.9  # of the running means of its two parts, which scatter


class NoiseScale:
    """tr Σ / |G|², estimated from the lengths of a micro-batch's gradient and of the whole update's.

    Args:
        parameters: whose gradients.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._small: tuple[float, int] = (0.0, 0)
        self._parts: tuple[float, float] | None = None

    def small(self, count: int, total: int) -> None:
        """Take the gradient that stands after the first micro-batch, of ``count`` of ``total`` positions."""
        self._small = self._square() * (total / count) ** 2, count

    def large(self, total: int) -> float | None:
        """Take the update's gradient. Returns the scale in positions; None where it cannot be told."""
        big, (small, count) = self._square(), self._small
        if count == total:
            return None
        signal = (total * big - count * small) / (total - count)
        noise = (small - big) / (1 / count - 1 / total)
        before = (signal, noise) if self._parts is None else self._parts
        self._parts = tuple(DECAY * b + (1 - DECAY) * n for b, n in zip(before, (signal, noise), strict=True))  # pyright: ignore[reportAttributeAccessIssue]
        assert self._parts is not None
        return self._parts[1] / self._parts[0] if min(self._parts) > 0 else None

    def _square(self) -> float:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients)) ** 2
