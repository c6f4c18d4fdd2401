"""Device and arithmetic of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
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


@contextlib.contextmanager
def exact_products(device: torch.device) -> Generator[None]:
    """Inside, large float32 products on a CPU go to oneDNN where MKL is known to be slow and nothing is lost.

    With AVX-512 oneDNN reaches about twice MKL's share of the peak on AMD's cores. PyTorch sends it float32
    products only under the precision "medium", by which it may round to bfloat16, and does where there are
    AMX units; a product is therefore tried, and the setting left alone if it is less exact than before.
    """
    before = _setting() if device.type == "cpu" and _has_avx512_alone() else None
    if before != "highest":
        yield
        return
    exact = _error()
    torch.set_float32_matmul_precision("medium")
    try:
        if _error() > 2 * exact:
            torch.set_float32_matmul_precision(before)
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _has_avx512_alone() -> bool:
    cpu = torch.cpu
    return cpu._is_avx512_supported() and not cpu._is_amx_tile_supported()  # pyright: ignore[reportPrivateUsage]


def _setting() -> str | None:
    """PyTorch's setting; None where a part of it was set by its newer names, which it refuses to mix."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _error() -> float:
    """Relative error of a product of more than the least size that is sent elsewhere."""
    steps = torch.arange(128 * 512, dtype=torch.float32)
    a, b = steps.sin().view(128, 512), steps.cos().view(512, 128)
    true = a.double() @ b.double()
    return float(((a @ b).double() - true).norm() / true.norm())
