"""What is computed between modules while a module runs: sums of the stream, projections written inline."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from isoform.verify.sources import source
from isoform.verify.watching import Seen, tensors

_PRODUCTS = frozenset(("linear", "matmul", "__matmul__", "einsum", "tensordot"))
_SUMS = frozenset(("add", "__add__", "__radd__", "__iadd__", "add_"))


@contextmanager
def listening(module: nn.Module, length: int, seen: list[Seen]) -> Generator[None]:
    """Append to ``seen`` what no module gives out: sums and projections ``[B, T, d]``.

    Scores hold every pair of positions before they are masked, and rightly so; what attention mixes may be
    put together from several parts before it is anything. Both are left out.
    """
    stack = [""]
    handles: list[Any] = []
    for path, part in module.named_modules():

        def enter(_: nn.Module, __: Any, path: str = path) -> None:
            stack.append(path)

        def leave(_: nn.Module, __: Any, ___: Any) -> None:
            stack.pop()

        handles += [part.register_forward_pre_hook(enter), part.register_forward_hook(leave)]
    try:
        with _Functions(length, stack, seen):
            yield
    finally:
        for handle in handles:
            handle.remove()


class _Functions(TorchFunctionMode):
    def __init__(self, length: int, stack: list[str], seen: list[Seen]) -> None:
        super().__init__()
        self.length, self.stack, self.seen = length, stack, seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if isinstance(out, Tensor) and out.is_floating_point() and self._tells(name, args, out):
            path = self.stack[-1] or "forward"
            # A sum in place goes on changing.
            kept = out.detach().clone() if name in ("__iadd__", "add_") else out
            self.seen.append(Seen(f"{path} ({source()})", kept, inline=True))
        return out

    def _tells(self, name: str, args: Any, out: Tensor) -> bool:
        if out.dim() != 3 or out.shape[-1] == self.length:
            return False
        if name in _SUMS:
            return True
        square = (self.length, self.length)
        return name in _PRODUCTS and all(t.shape[-2:] != square for _, t in tensors(args))
