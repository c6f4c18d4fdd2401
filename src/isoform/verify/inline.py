"""What is computed between modules while a module runs: attention, sums of the stream, projections."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from isoform.verify.sources import source
from isoform.verify.watching import Seen, averages, tensors

_PRODUCTS = frozenset(("linear", "matmul", "__matmul__", "bmm", "einsum", "tensordot"))
_SUMS = frozenset(("add", "__add__", "__radd__", "__iadd__", "add_"))
_QUOTIENTS = frozenset(("div", "true_divide", "__truediv__", "__itruediv__", "div_"))
_IN_PLACE = frozenset(("__iadd__", "add_", "__itruediv__", "div_"))


@contextmanager
def listening(module: nn.Module, batch: int, length: int, seen: list[Seen]) -> Generator[None]:
    """Append to ``seen`` what no module gives out: sums, projections, and what attention mixes.

    Scores hold every pair of positions before they are masked, and rightly so: they are left out.
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
        with _Functions(batch, length, stack, seen):
            yield
    finally:
        for handle in handles:
            handle.remove()


class _Functions(TorchFunctionMode):
    def __init__(self, batch: int, length: int, stack: list[str], seen: list[Seen]) -> None:
        super().__init__()
        self.batch, self.length, self.stack, self.seen = batch, length, stack, seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        value = self._told(name, args, out)
        if value is not None:
            path = self.stack[-1] or "forward"
            # What was changed once may be again.
            kept = value.detach().clone() if name in _IN_PLACE else value
            self.seen.append(Seen(f"{path} ({source()})", kept, inline=True))
        return out

    def _told(self, name: str, args: Any, out: Any) -> Tensor | None:
        """A result that says what a position reads, batch and time in front where it was attention."""
        if name == "multi_head_attention_forward":  # [T, B, d] and the weights
            return out[0].transpose(0, 1) if out[0].dim() == 3 else out[0][None]
        if not isinstance(out, Tensor) or not out.is_floating_point():
            return None
        if name == "scaled_dot_product_attention":
            return self._by_position(out, out.dim() - 2)
        if name in _SUMS:
            return out if out.dim() == 3 and out.shape[-1] != self.length else None
        if name in _QUOTIENTS:  # weights may be divided by their sum behind the product
            one = len(args) > 1 and isinstance(args[1], Tensor) and args[1].shape == (*out.shape[:-1], 1)
            return self._by_position(out, out.dim() - 2) if one and out.shape[-1] != self.length else None
        if name not in _PRODUCTS:
            return None
        axis = _queries(args, self.length, out)
        if axis is not None:
            return self._by_position(out, axis)
        square = (self.length, self.length)
        plain = out.dim() == 3 and out.shape[-1] != self.length
        return out if plain and all(t.shape[-2:] != square for _, t in tensors(args)) else None

    def _by_position(self, value: Tensor, axis: int) -> Tensor | None:
        """``[B, T, …]`` of a value with its queries on an axis; rows and heads may be one axis in front."""
        if axis < 0 or value.shape[axis] != self.length:
            return None
        if axis and value.shape[0] != self.batch and value.shape[0] % self.batch == 0:
            value, axis = value.unflatten(0, (self.batch, -1)), axis + 1
        if axis == 0 and self.batch == 1:
            value, axis = value[None], 1
        rows = next((i for i, size in enumerate(value.shape) if size == self.batch and i != axis), None)
        return None if rows is None else value.movedim((rows, axis), (0, 1))


def _queries(args: Any, length: int, out: Tensor) -> int | None:
    """The axis of a product on which the queries stand, if one operand averages over positions.

    Weights that do not add up to one may hold what a division takes out again (the largest score, say).
    """
    if args and isinstance(args[0], str):
        found = _labelled(args[0], [t for _, t in tensors(args[1:])], length)
    else:
        left = args[0] if args and isinstance(args[0], Tensor) else None
        if left is None or left.dim() < 2 or left.shape[-2:] != (length, length):
            return None
        found = left, -1, out.dim() - 2
    if found is None:
        return None
    weights, keys, axis = found
    return axis if averages(weights, keys) else None


def _labelled(equation: str, operands: list[Tensor], length: int) -> tuple[Tensor, int, int] | None:
    """Of ``einsum``: the weights, their axis of keys, and the queries' in the result."""
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    names = inputs.split(",")
    if not arrow or "." in equation or len(names) != 2 or len(operands) != 2:
        return None
    for number, name in enumerate(names):
        sizes = dict(zip(name, operands[number].shape, strict=False))
        other = names[1 - number]
        keys = [x for x in name if x not in result and x in other and sizes[x] == length]
        queries = [x for x in name if x in result and x not in other and sizes[x] == length]
        if len(keys) == len(queries) == 1:
            return operands[number], name.index(keys[0]), result.index(queries[0])
    return None
