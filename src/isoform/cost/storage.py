"""What is stored while a network runs: named tensors with a closed form, and how wide their elements are."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from isoform.config import Attention, Embedding, Norm
from isoform.cost.component import Sizes
from isoform.cost.formula import Formula
from isoform.cost.workload import BYTES, Kernel, Workload


@dataclasses.dataclass(frozen=True)
class Widths:
    """Bytes an element takes.

    Attributes:
        compute: operands and results of matrix products.
        stream: the residual stream; wider than ``compute`` under autocast.
        wide: what is kept in at least single precision: statistics, half-precision softmax.
        weight: parameters and their gradients.
        flag: whether dropout stores a flag (CUDA) and not the factors themselves.
        state: optimizer state and master weights; see `Workload.optimizer`.
        autocast: whether products convert their operands, so that the copy is stored, not the original.
        copies: whether converted weights are stored too; sharded ones are gathered in half precision instead.
    """

    compute: int
    stream: int
    wide: int
    weight: int
    state: int
    flag: bool
    autocast: bool
    copies: bool

    @classmethod
    def of(cls, work: Workload) -> Widths:
        """The widths of a workload."""
        autocast = work.dtype == "bfloat16_autocast"
        compute = BYTES["bfloat16" if autocast else work.dtype]
        stream = 4 if autocast else compute
        state = stream if work.optimizer == "adamw" else 4
        return cls(
            compute=compute,
            stream=stream,
            wide=max(compute, 4),
            weight=stream,
            state=state,
            flag=work.device == "cuda",
            autocast=autocast,
            copies=autocast and work.shard != "fsdp",
        )

    def noise(self, width: int) -> int:
        """What dropout stores for each element of a tensor of that width."""
        return 1 if self.flag else width

    def after(self, table: Embedding) -> Widths:
        """The widths behind an embedding: where a product makes the stream, autocast makes it narrow."""
        narrow = table.projection is not None and table.n_token_types == 0
        return dataclasses.replace(self, stream=self.compute) if narrow else self

    @property
    def half(self) -> bool:
        """Whether products run in half precision."""
        return self.compute == 2


@dataclasses.dataclass(frozen=True)
class Stored:
    """Tensors of one kind.

    Attributes:
        name: what they are.
        formula: elements, in closed form.
        sizes: the value of every symbol.
        width: bytes an element.
    """

    name: str
    formula: Formula
    sizes: Sizes
    width: int

    @property
    def bytes(self) -> int:
        """Bytes."""
        return self.formula.value(self.sizes) * self.width

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with stable keys."""
        used = self.formula.symbols()
        return {
            "name": self.name,
            "formula": str(self.formula),
            "sizes": {k: v for k, v in self.sizes.items() if k in used},
            "width": self.width,
            "bytes": self.bytes,
        }


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a layer runs.

    Attributes:
        rows: tokens a row, T or S.
        keys: tokens read by self-attention, the same except in decode.
        sizes: the values of B, T, S, K and d.
        work: the workload.
        widths: bytes an element.
    """

    rows: Formula
    keys: Formula
    sizes: dict[str, int]
    work: Workload
    widths: Widths

    def stored(self, name: str, elements: Formula, width: int, **more: int) -> Stored:
        """Tensors whose elements are counted in this place's sizes, and more."""
        return Stored(name, elements, {**self.sizes, **more}, width)

    def kernel(self, attention: Attention, columns: Formula) -> Kernel:
        """How an attention over so many keys is computed here."""
        return self.work.kernel(attention, self.rows.value(self.sizes), columns.value(self.sizes))

    def widened(self, **more: int) -> Place:
        """The same place with further sizes."""
        return dataclasses.replace(self, sizes={**self.sizes, **more})


@dataclasses.dataclass(frozen=True)
class Moment:
    """A full moment within a block's pass.

    Attributes:
        alive: what is there beside what is stored: results on the way forward, gradients on the way back.
        freed: which of the block's stored tensors are no longer needed, by name.
        weights: elements of the block's parameter gradients that are there by now.
    """

    alive: tuple[Stored, ...]
    freed: frozenset[str] = frozenset()
    weights: int = 0


@dataclasses.dataclass(frozen=True)
class Block:
    """A stretch of the forward pass that is undone as one in the backward pass.

    Attributes:
        name: dotted, after the component.
        kept: what the backward pass needs and is stored until then.
        forward: what is alive at the block's fullest moment when no backward pass follows.
        working: the full moments of its forward pass in training: what is alive beside what is stored.
        backward: the full moments of its backward pass.
        weights: elements of the parameters whose gradient this block produces.
    """

    name: str
    kept: tuple[Stored, ...] = ()
    forward: tuple[Stored, ...] = ()
    working: tuple[Moment, ...] = ()
    backward: tuple[Moment, ...] = ()
    weights: int = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of ``kept``."""
        return stored_bytes(self.kept)

    def moment_bytes(self, moment: Moment, weight_width: int) -> int:
        """What the block holds at one of its moments: tensors still stored, gradients of both kinds."""
        kept = stored_bytes(s for s in self.kept if s.name not in moment.freed)
        return kept + stored_bytes(moment.alive) + moment.weights * weight_width


def stored_bytes(things: Iterable[Stored]) -> int:
    """Their bytes together."""
    return sum(thing.bytes for thing in things)


def normed(norm: Norm, elements: Formula, groups: Formula, place: Place, width: int) -> tuple[Stored, ...]:
    """What a norm over ``groups`` vectors of together ``elements`` elements stores."""
    w, cuda = place.widths, place.work.device == "cuda"
    if norm.kind == "layer":
        return (
            place.stored("input", elements, width),
            place.stored("statistics", groups * 2, w.wide),
        )
    if width == 2:  # half precision: computed on a wider copy, written out
        kept = [place.stored("wide input", elements, 4), place.stored("statistics", groups, 4)]
        if norm.gain:
            kept.append(place.stored("normalised", elements, 4 if norm.gain_after_cast else width))
        return tuple(kept)
    kept = [place.stored("input", elements, width), place.stored("statistics", groups, w.wide)]
    if norm.gain and not cuda:
        kept.append(place.stored("normalised", elements, width))
    return tuple(kept)
