"""The structures of ``list.h``, and the list of operations that it walks through."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import c_double, c_int32, c_int64, c_void_p
from typing import Literal, get_args

import torch
from torch import Tensor

NONE: Mapping[str, float] = {}
Kind = Literal["norm", "linear", "add", "copy", "rotate", "attend", "cross", "round"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ACTIVATIONS = (
    "identity",
    "relu",
    "relu_squared",
    "gelu",
    "gelu_tanh",
    "quick_gelu",
    "silu",
    "sigmoid",
    "tanh",
    "elu",
    "leaky_relu",
    "softplus",
    "mish",
    "softcap",
)
BUFFERS = ("stream", "normed", "other", "heads", "context", "hidden", "increment", "rounded", "scores")
"""What operations read and write, each ``[rows, width]``."""


class Op(ctypes.Structure):
    """One operation; field by field the ``Op`` of ``list.h``."""

    _fields_ = [
        *((name, c_int32) for name in ("kind", "form", "act", "gated", "input", "out", "source", "layer")),
        *((name, c_int32) for name in ("in_at", "out_at")),
        *((name, c_int64) for name in ("n", "m", "count")),
        *((name, c_void_p) for name in ("weight", "scale", "bias")),
        *((name, c_double) for name in ("alpha", "eps", "softcap")),
        *((name, c_int32) for name in ("rms", "near", "heads", "kv", "width", "unused")),
    ]


class Near(ctypes.Structure):
    """What the layers of one kind share; the ``Near`` of ``list.h``."""

    _fields_ = [
        *((name, c_int64) for name in ("window", "rotary", "interleaved")),
        *((name, c_void_p) for name in ("cos", "sin", "bias")),
        ("distances", c_int64),
    ]


class Call(ctypes.Structure):
    """One step; the ``Call`` of ``list.h``."""

    _fields_ = [
        *((name, c_int64) for name in ("rows", "used", "threads")),
        *((name, c_int64) for name in ("layer_stride", "row_stride", "head_stride")),
        *((name, c_void_p) for name in ("cache", "trail")),
        ("trail_stride", c_int64),
        *((name, c_void_p) for name in ("starts", "samples", "memory")),
        ("source", c_int64),
        *((name, c_void_p) for name in ("source_added", "buffers", "strides", "spare")),
        ("spare_stride", c_int64),
    ]


class Program:
    """Operations in the order they are made in, and every tensor they point to.

    Args:
        dtype: what is computed in.
        copies: whether weights that do not lie row by row may be copied.
    """

    def __init__(self, dtype: torch.dtype, *, copies: bool) -> None:
        self.dtype, self.copies = dtype, copies
        self.ops: list[Op] = []
        self.widths: dict[str, int] = dict.fromkeys(BUFFERS, 0)
        self._held: list[Tensor] = []

    def add(
        self,
        kind: Kind,
        given: str,
        out: str,
        *,
        source: str | None = None,
        tensors: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
        act: str = "identity",
        alpha: float = 1.0,
        numbers: Mapping[str, float] = NONE,
    ) -> None:
        """One more operation.

        Args:
            kind: what is done.
            given: the buffer that is read.
            out: the buffer that is written.
            source: the buffer that is added to what is written.
            tensors: weight; scale or gain; bias.
            act: applied to what is written.
            alpha: what is written is multiplied by it, scores are.
            numbers: other fields of `Op`.
        """
        op = Op(
            kind=KINDS.index(kind),
            act=ACTIVATIONS.index(act),
            input=BUFFERS.index(given),
            out=BUFFERS.index(out),
            source=-1 if source is None else BUFFERS.index(source),
            alpha=alpha,
            weight=self._pointer(tensors[0]),
            scale=self._pointer(None if tensors[1] is None else tensors[1].to(self.dtype)),
            bias=self._pointer(None if tensors[2] is None else tensors[2].to(self.dtype)),
        )
        for name, value in numbers.items():
            setattr(op, name, value)
        self.ops.append(op)

    def need(self, buffer: str, width: int) -> None:
        """A buffer is at least so wide."""
        self.widths[buffer] = max(self.widths[buffer], width)

    def array(self) -> ctypes.Array[Op]:
        """The operations side by side."""
        return (Op * len(self.ops))(*self.ops)

    def _pointer(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        tensor = tensor.detach().contiguous()
        self._held.append(tensor)
        return tensor.data_ptr()


FORMS = {torch.bfloat16: 1, torch.int8: 2}
"""How a weight's numbers are stored; 0: as all others are."""
SPARE = 32
"""Numbers of each input that a thread has room for: the widest panel of outputs."""
EIGHT = 3
"""Numbers of 8 bits that meet inputs of 8 bits, as `eights.laid_out` lays them."""
