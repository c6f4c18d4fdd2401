"""Which library of PyTorch's multiplies float32 on a CPU."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator

import torch


@contextlib.contextmanager
def exact_products(device: torch.device) -> Generator[None]:
    """Inside, large float32 products on a CPU go to oneDNN where MKL is known to be slow and nothing is lost.

    With AVX-512 oneDNN reaches about twice MKL's share of the peak on AMD's cores. PyTorch sends it float32
    products only under the precision "medium", by which it may round to bfloat16, and does where there are
    AMX units; a product is therefore tried, and the setting left alone if it is less exact than before. So it
    is where an accelerator is in use, to which the setting means something else.
    """
    apart = device.type == "cpu" and not torch.cuda.is_initialized() and _has_avx512_alone()
    before = _setting() if apart else None
    if before != "highest" or not _nothing_is_lost():
        yield
        return
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def elsewhere() -> bool:
    """Whether float32 products go to oneDNN by now; a compiled graph does not ask."""
    return not torch.compiler.is_compiling() and _setting() == "medium"


@functools.cache
def _nothing_is_lost() -> bool:
    before, exact = torch.get_float32_matmul_precision(), _error()
    torch.set_float32_matmul_precision("medium")
    try:
        return _error() <= 2 * exact
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


def _error(dtype: torch.dtype = torch.float32) -> float:
    """Relative error of a product of more than the least size that is sent elsewhere."""
    with torch.autocast("cpu", enabled=False):
        steps = torch.arange(128 * 512, dtype=torch.float32)
        a, b = steps.sin().view(128, 512).to(dtype), steps.cos().view(512, 128).to(dtype)
        true = a.double() @ b.double()
        return float(((a @ b).double() - true).norm() / true.norm())
