"""The counters that the closed forms are held against: what a real module has, computes and keeps."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


def count_parameters(module: nn.Module) -> int:
    """Elements of all parameters; a shared one once."""
    return sum(p.numel() for p in module.parameters())


def count_flops(run: Callable[[], object]) -> int:
    """FLOPs of what ``run`` executes, by PyTorch's own counter.

    The counter knows ``mm``, ``addmm``, ``bmm``, ``baddbmm``, convolutions and CUDA's fused attention. It
    knows neither fused attention on CPU nor anything elementwise; choose explicit attention to count that.
    """
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@dataclasses.dataclass
class MemoryUse:
    """Bytes of tensor storages, as `measure_memory` sees them.

    Attributes:
        before: alive when it began: those of the tensors it was told of.
        current: alive now.
        peak: the most that was alive at once.
        peak_at: the operator during which that was so.
    """

    before: int = 0
    current: int = 0
    peak: int = 0
    peak_at: str = ""


@contextlib.contextmanager
def measure_memory(*existing: nn.Module | torch.Tensor) -> Generator[MemoryUse]:
    """Follow the bytes of all tensor storages that operators make inside the block, on any device.

    Every operator that PyTorch dispatches, in the backward pass too, passes through a mode that notes each
    new storage once and, by a weak reference, the moment it is freed; views cost nothing. On the ``meta``
    device this measures without allocating. Scratch space inside an operator, fragmentation and the
    allocator's rounding are not seen.

    Args:
        existing: modules and tensors that are already there and belong to the total.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    use = MemoryUse()
    sizes: dict[int, int] = {}

    def forget(key: int) -> None:
        use.current -= sizes.pop(key)

    def note(tensor: torch.Tensor, at: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata  # pyright: ignore[reportPrivateUsage]
        if key not in sizes:
            sizes[key] = storage.nbytes()
            use.current += sizes[key]
            weakref.finalize(storage, forget, key)
        if use.current > use.peak:
            use.peak, use.peak_at = use.current, at

    class Follow(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    note(leaf, str(func))
            return out

    for thing in existing:
        tensors = [thing] if isinstance(thing, torch.Tensor) else [*thing.parameters(), *thing.buffers()]
        for tensor in tensors:
            note(tensor, "before")
    use.before = use.current
    with Follow():
        yield use
