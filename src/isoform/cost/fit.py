"""Which batch and which length fit into a given memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from isoform.config import ModelConfig
from isoform.cost.memory import memory
from isoform.cost.workload import Workload
from isoform.errors import ConfigError

LONGEST = 2**24


@dataclasses.dataclass(frozen=True)
class Fit:
    """What fits on every device.

    Attributes:
        limit: bytes a device has.
        peak: bytes the work as asked for takes on the busiest device.
        fits: whether that is within the limit.
        largest_batch: the most rows over all devices at the length asked for; 0: not even one a device.
        largest_length: the longest sequence at the batch asked for; 0: not even one token.
        limited_by: what ends the length: ``memory``, the network's learned ``positions``, or this search's
            own ``bound`` of 2²⁴ tokens.
    """

    limit: int
    peak: int
    fits: bool
    largest_batch: int
    largest_length: int
    limited_by: str


def fit(config: ModelConfig, work: Workload, limit: int) -> Fit:
    """Search for the largest batch and the largest length whose peak stays within ``limit`` bytes.

    Peak memory never falls when either grows, so both are found by bisection. An encoder–decoder's source
    keeps its length.

    Raises:
        ConfigError: a limit below one byte, or work that the network cannot do.
    """
    if limit < 1:
        raise ConfigError(f"limit: {limit} bytes; expected at least 1")
    peak = memory(config, work).peak

    def batch_fits(rows: int) -> bool:
        return memory(config, dataclasses.replace(work, batch=rows * work.devices)).peak <= limit

    def length_fits(length: int) -> bool:
        prefix = min(work.prefix_length, length)
        return memory(config, dataclasses.replace(work, length=length, prefix_length=prefix)).peak <= limit

    table = config.embedding.positions
    positions = table.max_positions if table.kind == "learned" else None
    longest = LONGEST if positions is None else positions
    length = _largest(length_fits, longest)
    ended = "memory" if length < longest else "bound" if positions is None else "positions"
    return Fit(
        limit=limit,
        peak=peak,
        fits=peak <= limit,
        largest_batch=_largest(batch_fits, LONGEST) * work.devices,
        largest_length=length,
        limited_by=ended,
    )


def _largest(fits: Callable[[int], bool], bound: int) -> int:
    """The largest number up to the bound that fits, given that all smaller ones do; 0 for none."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= bound and fits(high):
        low, high = high, 2 * high
    high = min(high, bound + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
