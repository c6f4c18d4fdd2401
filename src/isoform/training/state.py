"""Where a run stands: everything besides tensors that the same numbers need to come out again."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isoform.data.batching import Position


@dataclasses.dataclass
class RunState:
    """Counters of a run; saved with every checkpoint.

    Attributes:
        step: updates made.
        position: where the data go on.
        tokens: supervised positions learnt from.
        skipped: micro-batches left out because nothing in them was supervised (R30).
        seconds: time spent in the loop, over all processes.
        waited: how much of it the next batches were waited for.
        best_step: the update after which validation was best; None before the first validation.
        best_nll: the NLL a token it had then.
        ranking: NLL and step of the best so far, best first; as many as are kept.
        waiting: validations since.
        validated_step: the update after which the last validation was.
        window: what has been summed up since the last line of the log.
    """

    step: int = 0
    position: Position = dataclasses.field(default_factory=Position)
    tokens: int = 0
    skipped: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    best_step: int | None = None
    best_nll: float | None = None
    waiting: int = 0
    validated_step: int | None = None
    ranking: list[tuple[float, int]] = dataclasses.field(default_factory=list[tuple[float, int]])
    window: dict[str, float] = dataclasses.field(default_factory=dict[str, float])

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; floats survive exactly."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RunState:
        """What `to_dict` gave."""
        fields: dict[str, Any] = {
            **data,
            "position": Position(**data["position"]),
            "ranking": [(nll, step) for nll, step in data["ranking"]],
        }
        return cls(**fields)


def random_state(device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The random generators a step may draw from: PyTorch's (of the CPU and the device) as tensors, Python's
    and NumPy's as plain values."""
    tensors = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    version, numbers, gauss = random.getstate()
    name, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    plain = {
        "python": [version, list(numbers), gauss],
        "numpy": [name, np.asarray(keys).tolist(), place, has_gauss, cached],
    }
    return tensors, plain


def restore_random_state(tensors: dict[str, Tensor], plain: dict[str, Any], device: torch.device) -> None:
    """Put back what `random_state` gave."""
    torch.set_rng_state(tensors["cpu"])
    if device.type == "cuda" and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"], device)
    version, numbers, gauss = plain["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, place, has_gauss, cached = plain["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), place, has_gauss, cached))
