"""Which micro-batches make an update, and how many updates there are."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch

from isoform.data.batching import Batch, Batches, LabelledBatch, Position, stream
from isoform.errors import SupervisionError
from isoform.training.guard import Micro
from isoform.training.loss import Work
from isoform.training.settings import Training
from isoform.training.state import RunState

AnyBatches = Batches[Batch] | Batches[LabelledBatch]


@dataclasses.dataclass(frozen=True, eq=False)
class Updates:
    """The micro-batches of each update, and where the data go on after it; from the state's position on.

    Micro-batches without supervision are left out and counted in the state (R30); an update without any other
    is not made.

    Args:
        train: the data.
        accumulation: micro-batches an update.
        device: where they are needed.
        state: where the run stands.
    """

    train: AnyBatches
    accumulation: int
    device: torch.device
    state: RunState

    def __iter__(self) -> Iterator[tuple[list[Micro], Position]]:
        position, empty = self.state.position, 0
        source: Iterator[tuple[Any, Position]] = stream(self.train, position)
        while True:
            micro: list[Micro] = []
            for _ in range(self.accumulation):
                batch, after = next(source)
                found = Micro(batch, position, Work.of(batch, self.device))
                position = after
                if found.work.count:
                    micro.append(found)
                    empty = 0
                    continue
                self.state.skipped += 1
                empty += 1
                if empty > self.train.count(position.epoch):
                    raise SupervisionError(
                        "no batch of a whole epoch has a supervised position: there is nothing to learn from"
                    )
            if micro:
                yield micro, position


def total_steps(train: AnyBatches, settings: Training) -> int | None:
    """Number of the last update by ``steps`` and ``epochs``; None when only time ends the run."""
    limits = [] if settings.steps is None else [settings.steps]
    if settings.epochs is not None:
        batches = sum(train.count(epoch) for epoch in range(settings.epochs))
        limits.append(math.ceil(batches / settings.accumulation))
    return min(limits) if limits else None
