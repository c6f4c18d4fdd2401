"""Which micro-batches make an update, and how many updates there are."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch

from isoform.data.batching import Batch, Batches, LabelledBatch, Position, stream
from isoform.errors import SupervisionError
from isoform.training.group import ALONE, Group
from isoform.training.guard import Micro
from isoform.training.loss import Work
from isoform.training.settings import Training
from isoform.training.state import RunState

AnyBatches = Batches[Batch] | Batches[LabelledBatch]


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """What one update reads.

    Attributes:
        micro: this process's micro-batches.
        after: where the data go on.
        count: supervised positions of all processes.
        pieces: micro-batches of all processes.
        passes: the most micro-batches that a process has; the others make up for it, so that all exchange
            equally often.
        tokens: ids read by all processes, padding left out.
    """

    micro: list[Micro]
    after: Position
    count: int
    pieces: int
    passes: int
    tokens: int


@dataclasses.dataclass(frozen=True, eq=False)
class Updates:
    """The micro-batches of each update, and where the data go on after it; from the state's position on.

    An update is the next ``accumulation`` micro-batches, whatever the number of processes: the i-th of them
    is the process's whose number is i modulo theirs. Micro-batches without supervision are left out and
    counted in the state (R30); an update without any other is not made.

    Args:
        train: the data.
        accumulation: micro-batches an update.
        device: where they are needed.
        state: where the run stands.
        group: the processes that share them.
    """

    train: AnyBatches
    accumulation: int
    device: torch.device
    state: RunState
    group: Group = ALONE

    def __iter__(self) -> Iterator[Update]:
        position, empty = self.state.position, 0
        source: Iterator[tuple[Any, Position]] = (
            stream(self.train, position) if self.group.alone else self._dealt(position)
        )
        while True:
            micro: list[Micro] = []
            skipped, first = 0, position
            for number in range(self.accumulation):
                batch, after = next(source)
                if batch is not None:
                    found = Micro(batch, position, Work.of(batch, self.device), number)
                    if found.work.count:
                        micro.append(found)
                    else:
                        skipped += 1
                position = after
            mine = (
                sum(m.work.count for m in micro),
                len(micro),
                sum(m.work.real_tokens for m in micro),
                skipped,
            )
            rows = self.group.table(mine)
            count, pieces, tokens, skipped = (int(sum(column)) for column in zip(*rows, strict=True))
            self.state.skipped += skipped
            empty = 0 if pieces else empty + skipped
            if empty > self.train.count(first.epoch):
                raise SupervisionError(
                    "no batch of a whole epoch has a supervised position: there is nothing to learn from"
                )
            if pieces:
                passes = max(int(row[1]) for row in rows)
                yield Update(micro, position, count, pieces, passes, tokens)

    def _dealt(self, position: Position) -> Iterator[tuple[Any, Position]]:
        """As `stream`, with nothing in the place of what other processes read."""
        while True:
            for number in range(self.accumulation):
                mine = number % self.group.size == self.group.rank
                batch = next(iter(self.train.epoch(position.epoch, position.batch))) if mine else None
                last = position.batch + 1 == self.train.count(position.epoch)
                position = (
                    Position(position.epoch + 1) if last else Position(position.epoch, position.batch + 1)
                )
                yield batch, position


def total_steps(train: AnyBatches, settings: Training) -> int | None:
    """Number of the last update by ``steps`` and ``epochs``; None when only time ends the run."""
    limits = [] if settings.steps is None else [settings.steps]
    if settings.epochs is not None:
        batches = sum(train.count(epoch) for epoch in range(settings.epochs))
        limits.append(math.ceil(batches / settings.accumulation))
    return min(limits) if limits else None
