"""The processes that train together: what they have to agree on goes through here."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from isoform.errors import ConfigError

T = TypeVar("T")
PATIENCE = datetime.timedelta(hours=6)  # the first process may write a long test alone


@dataclasses.dataclass(frozen=True)
class Group:
    """Which of how many processes this one is.

    Everything here is a barrier: all processes make the same calls in the same order. What passes through
    lies on the CPU, so that an accelerator is never waited for.

    Args:
        rank: number of this process.
        size: how many there are.
    """

    rank: int = 0
    size: int = 1

    @property
    def alone(self) -> bool:
        """Whether there is nobody else."""
        return self.size == 1

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes and renames files."""
        return self.rank == 0

    def table(self, values: Sequence[float]) -> list[list[float]]:
        """The numbers of all processes, a row each; exact up to 2⁵³."""
        if self.alone:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine)
        return [row.tolist() for row in rows]

    def total(self, values: Sequence[float]) -> list[float]:
        """Sums over the processes, added in the order of their numbers everywhere."""
        return [sum(column) for column in zip(*self.table(values), strict=True)]

    def gather(self, value: T) -> list[T]:
        """The values of all processes."""
        if self.alone:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def from_first(self, make: Callable[[], T]) -> T:
        """What the first process makes, for all. What it raises, all raise."""
        if self.alone:
            return make()
        box: list[Any] = [None, None]
        if self.first:
            try:
                box[0] = make()
            except Exception as error:
                box[1] = error
        dist.broadcast_object_list(box, src=0)
        if box[1] is not None:
            raise box[1]
        return box[0]

    def together(self, make: Callable[[], T]) -> T:
        """What each process makes for itself; if one of them fails, all raise its error."""
        if self.alone:
            return make()
        found, error = None, None
        try:
            found = make()
        except Exception as caught:
            error = caught
        for other in self.gather(error):
            if other is not None:
                raise error or other
        return found  # pyright: ignore[reportReturnType]


ALONE = Group()


def present() -> Group:
    """The group of this process: all of a launched run, or itself alone."""
    if dist.is_available() and dist.is_initialized():
        return Group(dist.get_rank(), dist.get_world_size())
    return Group()


@contextlib.contextmanager
def joined(device: str) -> Generator[Group]:
    """Join the processes that ``torchrun`` has started; a process started otherwise is alone.

    Args:
        device: the run file's device. On CUDA each process of a machine takes a GPU of its own, and tensors
            there go through NCCL; what lies on the CPU goes through Gloo.

    Raises:
        ConfigError: several processes were told to share one GPU.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or dist.is_initialized():
        yield present()
        return
    cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if cuda:
        if device not in ("auto", "cuda"):
            raise ConfigError(f'training.device: {device!r} names one GPU for {size} processes; write "cuda"')
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=PATIENCE)
    try:
        yield present()
    finally:
        dist.destroy_process_group()
