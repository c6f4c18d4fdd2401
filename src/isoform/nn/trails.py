"""The cache of the compiled step: what was written stays where it is, and rows know where their past lies.

A row that goes on from another one, as beams, drafts and what remains of a batch do, takes over a list of
places, a number a slot, and not the keys and values themselves. A prompt is therefore in memory once, however
many outputs it has.
"""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from isoform.nn.lanes import Lanes, room


@dataclasses.dataclass(eq=False)
class Trails:
    """Keys and values of every layer, ``keys of layer i`` at 2i and its values at 2i + 1.

    Args:
        own: what was written, by the row that wrote it.
        rows: outputs under way; row r writes to row r of ``own``.
        used: slots that are written; a row's next token stands at position ``used`` less its first slot.
        starts: first slot of each row; None: 0.
        samples: whose source each row reads.
        trail: ``[rows, capacity]`` the row of ``own`` that holds each of a row's slots; None: its own.
        memory: each layer's keys and values of the sources, side by side.
        memory_mask: ``[B, S]`` added to scores; None: nothing is forbidden.
    """

    own: Float[Tensor, "twice written kv capacity width"]
    rows: int
    used: int
    starts: Int[Tensor, " rows"] | None
    samples: Int[Tensor, " rows"]
    trail: Int[Tensor, "rows capacity"] | None = None
    memory: list[Tensor] | None = None
    memory_mask: Float[Tensor, "samples source"] | None = None

    @classmethod
    def of(cls, lanes: Lanes) -> Trails:
        """Take over prompts that end at one slot."""
        starts = None if isinstance(lanes.offset, int) else -lanes.offset
        memory = None if lanes.memory is None else [part for pair in lanes.memory for part in pair]
        mask = lanes.memory_mask
        return cls(
            lanes.own,
            lanes.rows,
            lanes.used,
            starts,
            torch.arange(lanes.rows, dtype=torch.int32),
            memory=memory,
            memory_mask=None if mask is None else mask[:, 0, 0].contiguous(),
        )

    @property
    def capacity(self) -> int:
        """Slots a row."""
        return self.own.shape[3]

    def reserve(self, most: int) -> None:
        """Make room for one more token, and some more for later, ``most`` slots in all."""
        if self.used < self.capacity:
            return
        more = room(self.used, most) - self.capacity
        self.own = F.pad(self.own, (0, 0, 0, more))
        if self.trail is not None:
            self.trail = torch.cat([self.trail, self._each(self.rows, more)], 1)

    def select(self, rows: Int[Tensor, " n"]) -> None:
        """Go on with the given rows in the given order, repeats allowed."""
        count = len(rows)
        if count > self.own.shape[1]:
            twice, written, kv, capacity, width = self.own.shape
            grown = self.own.new_empty(twice, count, kv, capacity, width)
            grown[:, :written, :, : self.used] = self.own[:, :, :, : self.used]
            self.own = grown
        old = self.trail
        if old is None:
            old = rows.to(torch.int32)[:, None].expand(-1, self.used)
        else:
            old = old[:, : self.used].index_select(0, rows)
        self.trail = torch.cat([old, self._each(count, self.capacity - self.used)], 1)
        self.samples = self.samples.index_select(0, rows)
        self.starts = None if self.starts is None else self.starts.index_select(0, rows)
        self.rows = count

    def _each(self, rows: int, slots: int) -> Tensor:
        return torch.arange(rows, dtype=torch.int32)[:, None].expand(-1, slots)
