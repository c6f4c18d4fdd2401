"""Keys and values of tokens already read, preallocated (R31–R32).

A row's token at place p lies in slot p, whatever the padding of the prompt was, so positions, visibility and
contents cannot drift apart. Lengths are tensors: one compiled step serves every position.
"""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from isoform.config import ModelConfig
from isoform.errors import ShapeError
from isoform.places import Places
from isoform.tokens import Tokens


@dataclasses.dataclass(eq=False)
class LayerCache:
    """One layer's keys and values, ``[B, h_kv, capacity, d_h]``."""

    keys: Float[Tensor, "batch kv capacity width"]
    values: Float[Tensor, "batch kv capacity width"]

    def write(
        self,
        keys: Float[Tensor, "batch kv length width"],
        values: Float[Tensor, "batch kv length width"],
        slots: Int[Tensor, "batch length"],
        start: int | None = None,
    ) -> None:
        """Put new keys and values into their slots; ``start`` is the first one where all rows agree on it."""
        if start is not None:
            end = start + keys.shape[2]
            self.keys[:, :, start:end] = keys
            self.values[:, :, start:end] = values
            return
        if keys.dtype != self.keys.dtype:  # under autocast they come in half precision
            keys, values = keys.to(self.keys.dtype), values.to(self.values.dtype)
        where = slots[:, None, :, None].expand_as(keys)
        self.keys.scatter_(2, where, keys)
        self.values.scatter_(2, where, values)


@dataclasses.dataclass(eq=False)
class Cache:
    """All layers' keys and values, and how far each row has come.

    Args:
        layers: one `LayerCache` a layer.
        lengths: ``[B]`` tokens stored in each row.
        visible: how many slots attention reads; at least the longest row. None: all.
        memory: for an encoder–decoder, each layer's projected source keys and values, computed once.
        memory_places: where the source tokens stand.
        prefix: ``[B]`` length of the condition, for a prefix decoder.
        fresh: nothing has been stored yet.
        block: all of ``layers`` as one tensor, keys of layer i at 2i and its values at 2i + 1; None: they are
            of several shapes, or were moved since.
        even: how long every row is, where that is one number known on the host: nothing then lies beyond it
            that a step would have to mask. None: read ``lengths``, as a compiled step must.
    """

    layers: list[LayerCache]
    lengths: Int[Tensor, " batch"]
    visible: int | None = None
    memory: list[tuple[Tensor, Tensor]] | None = None
    memory_places: Places | None = None
    prefix: Int[Tensor, " batch"] | None = None
    fresh: bool = True
    even: int | None = None
    block: Float[Tensor, "twice batch kv capacity width"] | None = None

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        batch: int,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> Cache:
        """An empty cache for ``capacity`` tokens a row.

        Raises:
            ShapeError: the model's learned positions end before ``capacity``.
        """
        table = config.embedding.positions
        if table.kind == "learned" and capacity > table.max_positions:
            raise ShapeError(
                f"{capacity} positions asked for, the model's learned table has {table.max_positions}: "
                "shorten the prompt or lower max_new_tokens"
            )
        shapes = [(a.attention.n_kv_heads, a.attention.head_width) for a in config.stack.layers()]
        lengths = torch.zeros(batch, dtype=torch.long, device=device)
        if len(set(shapes)) == 1:
            kv, width = shapes[0]
            block = torch.zeros(2 * len(shapes), batch, kv, capacity, width, dtype=dtype, device=device)
            parts = block.unbind(0)
            pairs = zip(parts[::2], parts[1::2], strict=True)
            return cls([LayerCache(keys, values) for keys, values in pairs], lengths, block=block)
        layers: list[LayerCache] = []
        for kv, width in shapes:
            zeros = torch.zeros(2, batch, kv, capacity, width, dtype=dtype, device=device)
            layers.append(LayerCache(zeros[0], zeros[1]))
        return cls(layers, lengths)

    @property
    def capacity(self) -> int:
        """Slots a row."""
        return self.layers[0].keys.shape[2]

    @property
    def batch(self) -> int:
        """Rows."""
        return self.lengths.shape[0]

    def advance(self, tokens: Tokens) -> None:
        """Count tokens that were written."""
        known = tokens.real is None and not torch.compiler.is_compiling()
        first, self.fresh = self.fresh, False
        if first:
            self.even = tokens.length if known else None
        elif self.even is not None:
            self.even = self.even + tokens.length if known else None
        self.lengths += tokens.length if tokens.real is None else tokens.real.sum(-1)

    def select(self, rows: Int[Tensor, " n"]) -> Cache:
        """The given rows in the given order: beams reordered, finished samples dropped, prompts repeated."""
        return dataclasses.replace(
            self,
            layers=self._selected(rows),
            lengths=self.lengths.index_select(0, rows),
            memory=None
            if self.memory is None
            else [(k.index_select(0, rows), v.index_select(0, rows)) for k, v in self.memory],
            memory_places=None if self.memory_places is None else select_places(self.memory_places, rows),
            prefix=None if self.prefix is None else self.prefix.index_select(0, rows),
            block=None,
        )

    def reorder(self, rows: Int[Tensor, " batch"]) -> Cache:
        """As `select`, for rows that change places among equally long ones of the same source.

        Prefix and source are then the same before and after, and are not copied.
        """
        return dataclasses.replace(
            self, layers=self._selected(rows), lengths=self.lengths.clone(), block=None
        )

    def grow(self, capacity: int) -> Cache:
        """The same content with room for more tokens. Slots not yet written hold zeros."""
        more = (0, 0, 0, capacity - self.capacity)
        layers = [LayerCache(F.pad(c.keys, more), F.pad(c.values, more)) for c in self.layers]
        return dataclasses.replace(self, layers=layers, lengths=self.lengths.clone(), block=None)

    def _selected(self, rows: Tensor) -> list[LayerCache]:
        return [LayerCache(c.keys.index_select(0, rows), c.values.index_select(0, rows)) for c in self.layers]


def select_places(places: Places, rows: Int[Tensor, " n"]) -> Places:
    """The given rows of one side's places, in the given order."""
    shared = places.index.shape[0] == 1
    return dataclasses.replace(
        places,
        index=places.index if shared else places.index.index_select(0, rows),
        real=None if places.real is None else places.real.index_select(0, rows),
        documents=None if places.documents is None else places.documents.index_select(0, rows),
        prefix=None if places.prefix is None else places.prefix.index_select(0, rows),
    )
