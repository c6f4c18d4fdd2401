"""Activations by their one exact name (R6, R8). Nothing here is called just "gelu" without saying which."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from isoform.config.parts import ActivationName


def _quick_gelu(u: Tensor) -> Tensor:
    return u * torch.sigmoid(1.702 * u)


def _gelu_tanh(u: Tensor) -> Tensor:
    return F.gelu(u, approximate="tanh")


ACTIVATIONS: dict[ActivationName, Callable[[Tensor], Tensor]] = {
    "identity": lambda u: u,
    "relu": F.relu,  # derivative at 0 taken as 0 (R8)
    "relu_squared": lambda u: F.relu(u).square(),
    "gelu": F.gelu,  # u·Φ(u), exact (6.6)
    "gelu_tanh": _gelu_tanh,  # (6.8)
    "quick_gelu": _quick_gelu,  # u·σ(1.702 u)
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "elu": F.elu,
    "leaky_relu": F.leaky_relu,
    "softplus": F.softplus,
    "mish": F.mish,
}


def activation(name: ActivationName) -> Callable[[Tensor], Tensor]:
    """The function of that name, elementwise."""
    return ACTIVATIONS[name]
