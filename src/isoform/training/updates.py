"""Which micro-batches make an update, and how many updates there are."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator
from contextlib import closing

import torch

from isoform.data.ahead import read_ahead
from isoform.data.batching import Batch, Batches, LabelledBatch, Position
from isoform.errors import SupervisionError
from isoform.training.group import ALONE, Group
from isoform.training.guard import Micro
from isoform.training.loss import Work
from isoform.training.settings import Training
from isoform.training.state import RunState

AnyBatches = Batches[Batch] | Batches[LabelledBatch]
Read = tuple[Batch | LabelledBatch, Work]


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

    def __iter__(self) -> Generator[Update]:
        position, empty = self.state.position, 0
        with closing(self._read(position)) as source:
            while True:
                micro: list[Micro] = []
                skipped, first = 0, position
                for number in range(self.accumulation):
                    found, after = next(source)
                    if found is not None:
                        batch, work = found
                        if work.count:
                            micro.append(Micro(batch, position, work.to(self.device), number))
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

    def _read(self, position: Position) -> Generator[tuple[Read | None, Position]]:
        """The batches without end, with the position to go on from after each; nothing in the place of what
        other processes read. They are made ahead, but no epoch is begun before its first batch is due."""
        number = 0  # in the update
        while True:
            epoch, count = position.epoch, self.train.count(position.epoch)
            with closing(read_ahead(self._mine(position, count, number))) as made:
                for index in range(position.batch, count):
                    found = next(made) if self._reads(number) else None
                    number = (number + 1) % self.accumulation
                    position = Position(epoch, index + 1) if index + 1 < count else Position(epoch + 1)
                    yield found, position

    def _mine(self, position: Position, count: int, number: int) -> Generator[Read]:
        """What this process reads of an epoch, from a position on."""
        if self.group.alone:
            for batch in self.train.epoch(position.epoch, position.batch):
                yield batch, Work.of(batch)
            return
        for index in range(position.batch, count):
            if self._reads((number + index - position.batch) % self.accumulation):
                batch = next(iter(self.train.epoch(position.epoch, index)))
                yield batch, Work.of(batch)

    def _reads(self, number: int) -> bool:
        return number % self.group.size == self.group.rank


def total_steps(train: AnyBatches, settings: Training) -> int | None:
    """Number of the last update by ``steps`` and ``epochs``; None when only time ends the run."""
    limits = [] if settings.steps is None else [settings.steps]
    if settings.epochs is not None:
        batches = sum(train.count(epoch) for epoch in range(settings.epochs))
        limits.append(math.ceil(batches / settings.accumulation))
    return min(limits) if limits else None


def uneven_shares(accumulation: int, processes: int) -> str | None:
    """A line on processes that wait for others in every update; None where all have as many micro-batches."""
    if accumulation % processes == 0:
        return None
    number = "the only micro-batch" if accumulation == 1 else f"the {accumulation} micro-batches"
    return (
        f"{processes} processes cannot share {number} of an update evenly, so that some wait for others: set"
        f" training.accumulation to a multiple of {processes}"
    )
