"""What counts as rounding noise."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

# Units in the last place that summing in another order may cost, on the largest value of a tensor. Measured:
# the same layer under eager and fused attention, batch 1 and batch 8, moves by 4 to 40 of them.
ULPS = 256.0
# In half precision sums are kept in float32: measured up to 4, in six families of 2 and of 12 layers.
HALF_ULPS = 8.0


def tolerance(value: Tensor) -> float:
    """The difference that rounding alone may cause in a tensor of these values."""
    finite = value.detach()[value.detach().isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    form = torch.finfo(value.dtype)
    return (ULPS if form.bits >= 32 else HALF_ULPS) * form.eps * max(largest, form.tiny)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal up to rounding; a NaN on one side only is a difference."""
    if a.shape != b.shape or not torch.equal(a.isnan(), b.isnan()):
        return False
    return largest_difference(a, b) <= max(tolerance(a), tolerance(b))


def largest_difference(a: Tensor, b: Tensor) -> float:
    """Largest absolute difference; infinite where only one side is NaN."""
    if a.numel() == 0:
        return 0.0
    a, b = a.detach(), b.detach()
    both = a.isnan() & b.isnan()
    gap = torch.where(both, 0.0, (a - b).abs().double())
    return float(gap.nan_to_num(nan=float("inf")).max())


def in_double(module: nn.Module, kwargs: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """A copy of module and inputs in float64, where rounding is far below any fault.

    Returns the originals where the module cannot run in float64, or rounds to a coarser type on its way:
    results that differ by that rounding would look like faults beside float64's.
    """
    try:
        wide = copy.deepcopy(module).double()
        inputs = {name: _double(value) for name, value in kwargs.items()}
        with torch.no_grad(), _Roundings() as seen:
            wide(**{name: v.clone() if isinstance(v, Tensor) else v for name, v in inputs.items()})
    except Exception:  # of other people's modules, which may raise anything
        return module, kwargs
    return (module, kwargs) if seen.found else (wide, inputs)


class _Roundings(TorchDispatchMode):
    """Notes whether anything but whole numbers is rounded from float64 to a coarser type."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.found and func is torch.ops.aten._to_copy.default:
            value: Tensor = args[0]
            if value.dtype == torch.float64 and out.is_floating_point() and out.dtype != torch.float64:
                self.found = bool(((value != value.round()) & value.isfinite()).any())
        return out


def is_half(module: nn.Module) -> bool:
    """Whether any weight is in half precision, which leaves little to tell a fault from rounding by."""
    kinds = {p.dtype for p in module.parameters() if p.is_floating_point()}
    return any(torch.finfo(kind).bits < 32 for kind in kinds)


def _double(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return value
