"""The step of `step` as machine code: one call a token, in which threads walk through a list of operations.

It is the same function, summed in another order; tests hold it to the modules in float64. There is nothing in
it that depends on a shape: one library serves every network, batch and length.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from isoform import config
from isoform.native.library import Library
from isoform.native.program import BUFFERS, SPARE, Call, Near, Program
from isoform.nn.flat import flat_head
from isoform.nn.lower import lower
from isoform.nn.step import Step
from isoform.nn.trails import Trails


class Compiled:
    """Reads one token a row; `compiled` makes it.

    Args:
        step: the step it stands for, which embeds tokens and keeps the tables of positions.
        library: for its type of number.
        program: the operations.
        head: what gives the scores, where the operations do not.
    """

    def __init__(
        self,
        step: Step,
        library: Library,
        program: Program,
        head: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self._step, self._library, self._head = step, library, head
        self._program, self._ops, self._widths = program, program.array(), program.widths
        self._nears: ctypes.Array[Near] | None = None
        self._tables: list[Tensor] = []
        self._until = 0
        self._buffers: list[Tensor] = []
        self._spare = torch.empty(0)
        self._call = Call()

    def __call__(self, ids: Int[Tensor, " rows"], trails: Trails) -> Float[Tensor, "rows vocab"]:
        """Read a token a row, and score the one after it. There is room for it: `Trails.reserve`.

        The scores are valid until the next step.
        """
        used = trails.used
        if used >= self._until:
            self._extend(used + 1)
        place = used if trails.starts is None else used - trails.starts
        stream = self._step.embed(ids, place).contiguous()
        self._fit(trails, stream)
        call = self._call
        call.used = used
        call.starts = _pointer(trails.starts)
        call.samples = _pointer(trails.samples)
        call.trail = _pointer(trails.trail)
        call.trail_stride = trails.capacity
        call.cache = trails.own.data_ptr()
        call.layer_stride, call.row_stride, call.head_stride, _, _ = trails.own.stride()
        self._library.step(self._ops, len(self._ops), self._nears, ctypes.byref(call))
        trails.used = used + 1
        scores = self._buffers[-1]
        return scores if self._head is None else self._head(stream)

    def _fit(self, trails: Trails, stream: Tensor) -> None:
        """Buffers for so many rows, the first of which is the stream itself."""
        rows, call = trails.rows, self._call
        threads = torch.get_num_threads()
        slots = max(trails.capacity, 0 if trails.memory is None else trails.memory[0].shape[2])
        spare = max(slots, SPARE * max(self._widths.values()))
        if call.rows != rows or call.threads != threads or call.spare_stride < spare:
            wide = {name: width for name, width in self._widths.items() if name != "stream"}
            self._buffers = [stream.new_empty(rows, wide[name]) for name in BUFFERS[1:]]
            self._spare = stream.new_empty(threads, spare)
            call.rows, call.threads, call.spare_stride = rows, threads, spare
            call.spare = self._spare.data_ptr()
            every = [stream, *self._buffers]
            self._addresses = (ctypes.c_void_p * len(every))(*(b.data_ptr() for b in every))
            self._strides = (ctypes.c_int64 * len(every))(*(b.shape[1] for b in every))
            call.buffers = ctypes.addressof(self._addresses)
            call.strides = ctypes.addressof(self._strides)
        self._addresses[0] = stream.data_ptr()
        if trails.memory is not None and call.memory is None:
            self._memory = (ctypes.c_void_p * len(trails.memory))(*(m.data_ptr() for m in trails.memory))
            call.memory, call.source = ctypes.addressof(self._memory), trails.memory[0].shape[2]
            call.source_added = _pointer(trails.memory_mask)

    def _extend(self, least: int) -> None:
        """What depends on positions, or distances, up to ``least`` and some more."""
        self._until, tables = self._step.tables(least)
        self._tables = []
        nears: list[Near] = []
        for kind, table in zip(self._step.stack.kinds, tables, strict=True):
            window, positions, _ = kind
            near = Near(window=window or 0, distances=self._until)
            if isinstance(positions, config.Rotary):
                cos, sin = (t.contiguous() for t in table)
                near.rotary, near.interleaved = positions.width, int(positions.layout == "interleaved")
                near.cos, near.sin = cos.data_ptr(), sin.data_ptr()
                self._tables += [cos, sin]
            elif table:
                bias = table[0].contiguous()
                near.bias = bias.data_ptr()
                self._tables.append(bias)
            nears.append(near)
        self._nears = (Near * len(nears))(*nears)


def compiled(step: Step, library: Library, *, copies: bool = True) -> Compiled | None:
    """A step as machine code; None where it has parts that are no operations.

    Args:
        step: the step.
        library: for its type of number.
        copies: whether weights that do not lie row by row, as GPT-2's files have them, may be copied.
    """
    found = lower(step.stack, step.token_head, step.d_model, step.dtype, copies=copies)
    if found is None:
        return None
    program, whole = found
    head = None if whole else flat_head(step.token_head)
    return Compiled(step, library, program, head)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
