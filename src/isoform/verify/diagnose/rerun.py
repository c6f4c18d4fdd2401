"""One operation of a pass, run again on other values, in float64.

Roundings that the code asks for (a norm in float32 inside a bfloat16 model) are left out of the second run:
two functions are compared, and their precision apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isoform.errors import DataError
from isoform.verify.record import Node, Ref

VIEWS = frozenset(
    (
        "view",
        "_unsafe_view",
        "reshape",
        "_reshape_alias",
        "unsqueeze",
        "squeeze",
        "alias",
        "clone",
        "contiguous",
        "detach",
        "_to_copy",
        "lift_fresh",
    )
)
"""Operators that keep the order of the elements."""


def run_again(node: Node, value: Callable[[Ref], Tensor], *, native: bool = False) -> Tensor:
    """A node's result.

    Args:
        node: the operation.
        value: what each of its arguments stands for now.
        native: in the precision of the pass; otherwise in float64.

    Raises:
        DataError: a recording that holds no operators.
    """
    if node.call is None:
        raise DataError("this recording holds no operators that could be run again")

    def live(item: Any) -> Any:
        if isinstance(item, Ref):
            return value(item)
        if isinstance(item, list):
            return [live(x) for x in item]
        if isinstance(item, torch.dtype) and not native:
            return _widest(item)
        return item

    args = [live(a) for a in node.args]
    kwargs = {k: live(v) for k, v in node.kwargs.items() if k != "output"}
    if node.op == "detach":  # no more than a matter of derivatives, which are asked for here
        return args[0] if native else wide(args[0])
    if node.inplace and args:
        args[0] = args[0].clone()
    if node.op == "_softmax" and not native:
        args[2] = False
    if node.op == "scalar_tensor" and not native:
        kwargs.setdefault("dtype", torch.float64)
    if node.op in ("view", "_unsafe_view") and isinstance(args[1], list):
        out = args[0].reshape(args[1])  # values that were put in may lie in memory in another order
    else:
        out = node.call(*args, **kwargs)
    if isinstance(out, tuple | list):
        out = [o for o in out if isinstance(o, Tensor)][node.kwargs.get("output", 0)]
    return out if native else wide(out)


def wide(value: Tensor) -> Tensor:
    """Floating-point values in float64, complex ones likewise, others as they are."""
    return value.to(_widest(value.dtype))


def _widest(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype
