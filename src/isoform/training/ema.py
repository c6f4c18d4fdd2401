"""A running mean of the weights (Polyak and Juditsky 1992)."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping

import torch
from torch import Tensor

from isoform.nn import Transformer
from isoform.training.parallel import cut_like, locals_of


class Ema:
    """θ̄ ← decay · θ̄ + (1 - decay) · θ after every update, beginning with the first weights.

    Args:
        model: whose weights.
        decay: how much of the old mean stays.
    """

    def __init__(self, model: Transformer, decay: float) -> None:
        self._model, self._decay = model, decay
        self._mean = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def update(self) -> None:
        """Take the present weights in."""
        now = dict(self._model.named_parameters())
        torch._foreach_lerp_(  # pyright: ignore[reportPrivateUsage]
            locals_of(list(self._mean.values())),
            locals_of([now[name].detach() for name in self._mean]),
            1 - self._decay,
        )

    @contextlib.contextmanager
    def in_place(self) -> Generator[None]:
        """Give the network the mean, and its own weights back afterwards."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def put(self) -> None:
        """Give the network the mean for good."""
        self._exchange()

    def tensors(self) -> dict[str, Tensor]:
        """The mean by name; weights that do not learn are their own mean, and left out."""
        return dict(self._mean)

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave."""
        for name, mean in self._mean.items():
            mean.copy_(cut_like(tensors[name].to(mean.device), mean))

    @torch.no_grad()
    def _exchange(self) -> None:
        now = dict(self._model.named_parameters())
        for name, mean in self._mean.items():
            kept = mean.clone()
            mean.copy_(now[name].detach())
            now[name].copy_(kept)
