"""Everything about the cost of one step, in one value."""

from __future__ import annotations

import dataclasses
from typing import Any

from isoform.config import ModelConfig
from isoform.cost.flops import Flops, flops
from isoform.cost.memory import Memory, memory
from isoform.cost.parameters import Parameters, parameters
from isoform.cost.roofline import Machine, Roofline, roofline
from isoform.cost.workload import (
    Backend,
    Device,
    Dtype,
    Loss,
    Mode,
    Optimizer,
    Recomputation,
    Shard,
    Workload,
)


@dataclasses.dataclass(frozen=True)
class CostReport:
    """What a step costs.

    Attributes:
        work: what is done.
        parameters: of the network.
        flops: of the busiest device.
        memory: of the busiest device.
        roofline: the time at a machine's limits; None where no machine was given.
    """

    work: Workload
    parameters: Parameters
    flops: Flops
    memory: Memory
    roofline: Roofline | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with stable keys."""
        return {
            "work": dataclasses.asdict(self.work),
            "parameters": self.parameters.to_dict(),
            "flops": self.flops.to_dict(),
            "memory": self.memory.to_dict(),
            "roofline": None if self.roofline is None else self.roofline.to_dict(),
        }


def cost(
    config: ModelConfig,
    *,
    batch: int,
    length: int,
    source_length: int | None = None,
    prefix_length: int = 0,
    dtype: Dtype = "float32",
    mode: Mode = "train",
    optimizer: Optimizer = "adamw",
    loss: Loss = "cross_entropy",
    recomputation: Recomputation = "none",
    attention: Backend = "auto",
    device: Device = "cpu",
    devices: int = 1,
    shard: Shard = "none",
    machine: Machine | None = None,
) -> CostReport:
    """Parameters, FLOPs, memory and, given a machine, time of one step (R26, R28).

    In closed form from the configuration: nothing is allocated, and any size takes milliseconds. ``machine``
    has the limits that `measure_machine` finds; the other arguments are those of `Workload`, which says what
    they mean.

    Raises:
        ConfigError: work that this network cannot do.
    """
    work = Workload(
        mode=mode,
        batch=batch,
        length=length,
        source_length=source_length,
        prefix_length=prefix_length,
        dtype=dtype,
        optimizer=optimizer,
        loss=loss,
        recomputation=recomputation,
        attention=attention,
        device=device,
        devices=devices,
        shard=shard,
    )
    return CostReport(
        work=work,
        parameters=parameters(config),
        flops=flops(config, work),
        memory=memory(config, work),
        roofline=None if machine is None else roofline(config, work, machine),
    )
