"""Device and arithmetic of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal

import torch

from isoform.config.base import Frozen
from isoform.errors import ConfigError
from isoform.training.settings import Precision

Chosen = Literal["float32", "bfloat16_autocast", "float64"]

MARGIN = 1.05  # bfloat16 has to be so many times faster to be worth its rounding


class Measured(Frozen):
    """``precision.json``: what "auto" has come to, to which later processes keep."""

    precision: Chosen
    """The faster one."""
    seconds_per_step: dict[Chosen, float]
    """What a step took in each."""


def device_of(name: str) -> torch.device:
    """The device of a name; "auto" is the accelerator where there is one, else the CPU.

    Raises:
        ConfigError: PyTorch knows no such device, or it is not there.
    """
    if name == "auto":
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return torch.device("cpu") if found is None else found
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"training.device: {name!r} cannot be used: {reason}") from None
    return device


def dtype_of(precision: Chosen) -> torch.dtype:
    """The type weights are held in."""
    return torch.float64 if precision == "float64" else torch.float32


def autocast(precision: Chosen, device: torch.device) -> AbstractContextManager[object]:
    """The context a forward pass runs in."""
    if precision != "bfloat16_autocast":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def choose(precision: Precision, seconds: Callable[[Chosen], float]) -> tuple[Chosen, dict[Chosen, float]]:
    """The precision to run in.

    Args:
        precision: the setting; "auto" compares float32 and bfloat16_autocast.
        seconds: measures one training step.

    Returns:
        The choice, and what was measured for it: nothing unless the setting is "auto".
    """
    if precision != "auto":
        return precision, {}
    candidates: tuple[Chosen, Chosen] = ("float32", "bfloat16_autocast")
    for candidate in candidates:
        seconds(candidate)  # warm
    measured: dict[Chosen, float] = {candidate: seconds(candidate) for candidate in candidates}
    faster = measured["bfloat16_autocast"] * MARGIN < measured["float32"]
    return ("bfloat16_autocast" if faster else "float32"), measured
