"""The cache of `step`: rows end at one slot, so that a step writes and reads slices, and masks nothing new.

The prompts are moved to the right once after they were read. From then on the next token of every row goes to
the same slot, a window is the last few slots, and what lies before a row's first token is forbidden for good.
Where a long prompt has several outputs (beams, drafts), it is kept once for all of them.
"""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from isoform.nn.cache import Cache
from isoform.nn.reading import forbidden

SHARED_FROM = 64
"""Slots of a prompt from which on its outputs read one copy: below, reading in two parts costs more."""


@dataclasses.dataclass(eq=False)
class Lanes:
    """Keys and values of every layer, ``keys of layer i`` at 2i and its values at 2i + 1.

    Args:
        own: what each row alone has read.
        used: slots of it that are written.
        offset: a row's next token stands at position ``used + offset``; a tensor where rows differ.
        mask: ``[N, 1, 1, capacity]`` added to scores: slots before a row's first token; None: there are none.
        shared: the prompts, one for every ``outputs`` rows; None: they lie in ``own``.
        shared_mask: ``[B, 1, 1, P]`` added to scores; None: all prompts are equally long.
        memory: each layer's keys and values of the source, one for every ``outputs`` rows.
        memory_mask: ``[B, 1, 1, S]`` added to scores; None: nothing is forbidden.
        outputs: rows a sample.
        ahead: tokens of the longest shared prompt, so that no token stands beyond ``ahead + used``.
    """

    own: Float[Tensor, "twice rows kv capacity width"]
    used: int
    offset: int | Int[Tensor, " rows"]
    mask: Float[Tensor, "rows 1 1 capacity"] | None = None
    shared: Float[Tensor, "twice samples kv prompt width"] | None = None
    shared_mask: Float[Tensor, "samples 1 1 prompt"] | None = None
    memory: list[tuple[Tensor, Tensor]] | None = None
    memory_mask: Float[Tensor, "samples 1 1 source"] | None = None
    outputs: int = 1
    ahead: int = 0
    _spare: Tensor | None = dataclasses.field(default=None, init=False, repr=False)

    @classmethod
    def of(cls, cache: Cache, lengths: list[int], memory_mask: Tensor | None) -> Lanes:
        """Take over a cache of prompts of these lengths, padded on the right; it is of no more use."""
        assert cache.block is not None
        own, longest = cache.block, max(lengths)
        offset: int | Tensor = 0
        mask = None
        if min(lengths) < longest:
            shift = [longest - length for length in lengths]
            for row, (by, length) in enumerate(zip(shift, lengths, strict=True)):
                if by:
                    own[:, row, :, by:longest] = own[:, row, :, :length].clone()
            starts = torch.tensor(shift, device=own.device)
            slots = torch.arange(own.shape[3], device=own.device)
            mask = forbidden((slots < starts[:, None])[:, None, None], own.dtype)
            offset = -starts
        memory = cache.memory  # projected side by side, and read at every step
        if memory is not None:
            memory = [(keys.contiguous(), values.contiguous()) for keys, values in memory]
        return cls(own, longest, offset, mask, memory=memory, memory_mask=memory_mask)

    @property
    def capacity(self) -> int:
        """Slots a row."""
        return self.own.shape[3]

    @property
    def rows(self) -> int:
        """Outputs under way."""
        return self.own.shape[1]

    def reserve(self, most: int) -> None:
        """Make room for one more token, and some more for later, ``most`` slots in all."""
        if self.used < self.capacity:
            return
        more = room(self.used, most) - self.capacity
        self.own = F.pad(self.own, (0, 0, 0, more))
        if self.mask is not None:
            self.mask = F.pad(self.mask, (0, more))

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        """Rows change places within their sample: they share its prompt, source and length."""
        spare = self._spare
        if spare is None or spare.shape != self.own.shape:
            spare = torch.empty_like(self.own)
        # Into what was held before the last move: new memory would take longer to get than to fill.
        written = self.own.narrow(3, 0, self.used)
        torch.index_select(written, 1, rows, out=spare.narrow(3, 0, self.used))
        self.own, self._spare = spare, self.own

    def select(self, rows: Int[Tensor, " n"], *, share: bool) -> None:
        """Go on with the given rows in the given order, repeats allowed.

        Args:
            rows: of those there are.
            share: rows that are repeated may read one copy of what they have read.
        """
        picked: list[int] = rows.tolist()
        outputs = _repeats(picked)
        if share and self.outputs == 1 and outputs > 1 and self.used >= SHARED_FROM:
            return self._share(rows[::outputs], outputs)
        self.own = self.own.index_select(1, rows)
        self.mask = None if self.mask is None else self.mask.index_select(0, rows)
        self.offset = self.offset if isinstance(self.offset, int) else self.offset.index_select(0, rows)
        if self.shared is None and self.memory is None:
            return None
        before = self.outputs
        if before == 1 and outputs > 1 and self.shared is None:  # the source is read by all of them
            self.outputs = outputs
            return self._keep_samples(picked[::outputs])
        samples = [row // before for row in picked]
        whole = [samples[i : i + before] for i in range(0, len(samples), before)]
        if len(samples) % before == 0 and all(len(set(group)) == 1 for group in whole):
            return self._keep_samples(samples[::before])
        return self._part(samples)

    def _share(self, samples: Tensor, outputs: int) -> None:
        """The prompts become what several rows read; their own part begins empty."""
        prompt = self.own[:, :, :, : self.used].index_select(1, samples)
        mask = None if self.mask is None else self.mask[..., : self.used].index_select(0, samples)
        offset = self.offset if isinstance(self.offset, int) else self.offset.index_select(0, samples)
        self.shared, self.shared_mask, self.mask, self.outputs = prompt, mask, None, outputs
        self.offset = (
            offset + self.used if isinstance(offset, int) else (offset + self.used).repeat_interleave(outputs)
        )  # the same positions, counted from the end of the prompt
        twice, n, kv, _, width = prompt.shape
        self.own = prompt.new_zeros(twice, n * outputs, kv, 16, width)
        self.ahead, self.used = self.used, 0
        self._keep_samples(samples.tolist(), prompts=False)

    def _keep_samples(self, samples: list[int], *, prompts: bool = True) -> None:
        index = torch.tensor(samples, device=self.own.device)
        if prompts and self.shared is not None:
            self.shared = self.shared.index_select(1, index)
            self.shared_mask = None if self.shared_mask is None else self.shared_mask.index_select(0, index)
        if self.memory is not None:
            self.memory = [(k.index_select(0, index), v.index_select(0, index)) for k, v in self.memory]
            self.memory_mask = None if self.memory_mask is None else self.memory_mask.index_select(0, index)

    def _part(self, samples: list[int]) -> None:
        """Every row gets a copy of what its sample shared."""
        self._keep_samples(samples)
        self.outputs = 1
        if self.shared is None:
            return
        prompt, length = self.shared, self.shared.shape[3]
        if self.shared_mask is not None:
            self.mask = F.pad(self.shared_mask, (0, self.capacity))
        self.own = torch.cat([prompt, self.own], 3)
        self.used += length
        self.offset = self.offset - length
        self.shared, self.shared_mask, self.ahead = None, None, 0


def _repeats(rows: list[int]) -> int:
    """k where the rows are groups of k equal ones; 1: no such k above 1."""
    count = next((i for i, row in enumerate(rows) if row != rows[0]), len(rows)) if rows else 1
    groups = [rows[i : i + count] for i in range(0, len(rows), count)]
    return count if all(len(g) == count and len(set(g)) == 1 for g in groups) else 1


def room(used: int, most: int) -> int:
    """Slots to have where ``used`` are full: a quarter more, so that growing stays a small share."""
    return min(max(used + 16, used * 5 // 4 + 15 & -16), most)
