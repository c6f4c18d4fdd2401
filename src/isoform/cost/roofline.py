"""The time of a step at a machine's measured limits, and which of them binds (the roofline model).

Each component takes at least its FLOPs ÷ the peak of matrix products, and at least its bytes ÷ the memory's
bandwidth; the longer of the two binds it, and the sum over components is the estimate. Work on several
devices is that of the busiest one; what they send each other is not counted.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from isoform.config import ModelConfig
from isoform.cost.memory import memory
from isoform.cost.products import Product, products
from isoform.cost.storage import Widths
from isoform.cost.workload import Dtype, Workload
from isoform.errors import ConfigError

if TYPE_CHECKING:
    import torch

Bound = Literal["compute", "bandwidth"]


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a machine can do at best.

    Attributes:
        device: ``cpu`` or ``cuda``.
        dtype: of the matrix products.
        flops: a second, in the best of a few square matrix products.
        bandwidth: bytes a second, read and written, over arrays far larger than the caches.
    """

    device: str
    dtype: str
    flops: float
    bandwidth: float


@dataclasses.dataclass(frozen=True)
class ComponentTime:
    """One component.

    Attributes:
        name: as in `isoform.cost.flops`.
        flops: of all its occurrences in the step.
        bytes: it has to move: weights, operands and results, once each.
        seconds: the longer of the two times.
        bound: which of the two it is.
    """

    name: str
    flops: int
    bytes: int
    seconds: float
    bound: Bound


@dataclasses.dataclass(frozen=True)
class Roofline:
    """A step at a machine's limits.

    Attributes:
        machine: the limits.
        seconds: the sum over components.
        tokens_per_second: that the step processes: target tokens, over all devices.
        bound: what binds most of the time.
        compute_seconds: all FLOPs at the machine's peak.
        bandwidth_seconds: all bytes at the machine's bandwidth.
        intensity: FLOPs a byte; above ``balance`` products bind, below it the memory.
        balance: FLOPs a byte at which the machine is equally strained.
        components: what it consists of.
    """

    machine: Machine
    seconds: float
    tokens_per_second: float
    bound: Bound
    compute_seconds: float
    bandwidth_seconds: float
    intensity: float
    balance: float
    components: tuple[ComponentTime, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with stable keys."""
        return dataclasses.asdict(self)


def roofline(config: ModelConfig, work: Workload, machine: Machine) -> Roofline:
    """Estimate the time of a step.

    Training counts three passes over each product (recomputation a fourth), and the optimizer's over weights,
    gradients and states. Normalisation, activations and residual sums are taken as fused into their
    neighbours, which no real run reaches: the estimate is a floor.

    Raises:
        ConfigError: work that this network cannot do, or limits that are not positive.
    """
    work.check(config)
    if machine.flops <= 0 or machine.bandwidth <= 0:
        raise ConfigError("machine: FLOPs and bandwidth must be positive")
    widths = Widths.of(work)
    parts = [_component(p, work, widths, machine) for p in products(config, work)]
    if work.mode == "train":
        held = memory(config, work)
        # AdamW reads weight, gradient and both moments and writes all but the gradient; the backward pass
        # writes the gradient.
        moved = 2 * held.weights + 2 * held.gradients + 2 * held.optimizer
        parts.append(_time("optimizer", 0, moved, machine))
    seconds = sum(part.seconds for part in parts)
    flops, moved = sum(part.flops for part in parts), sum(part.bytes for part in parts)
    bandwidth_bound = sum(part.seconds for part in parts if part.bound == "bandwidth")
    tokens = work.batch * (1 if work.mode == "decode" else work.length)
    return Roofline(
        machine=machine,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        bound="bandwidth" if 2 * bandwidth_bound > seconds else "compute",
        compute_seconds=flops / machine.flops,
        bandwidth_seconds=moved / machine.bandwidth,
        intensity=flops / moved,
        balance=machine.flops / machine.bandwidth,
        components=tuple(parts),
    )


def _component(product: Product, work: Workload, widths: Widths, machine: Machine) -> ComponentTime:
    passes = 1
    if work.mode == "train":
        passes = 4 if product.in_layer and work.recomputation == "layer" else 3
    sizes = product.sizes
    flops = 2 * product.multiply_adds.value(sizes) * product.uses * passes
    # Autocast reads float32 weights and writes the copies it multiplies with.
    weight = widths.weight if not widths.autocast else widths.weight + widths.compute
    moved = product.weights.value(sizes) * weight + product.activations.value(sizes) * widths.compute
    return _time(product.name, flops, moved * product.uses * passes, machine)


def _time(name: str, flops: int, moved: int, machine: Machine) -> ComponentTime:
    compute, bandwidth = flops / machine.flops, moved / machine.bandwidth
    bound: Bound = "compute" if compute >= bandwidth else "bandwidth"
    return ComponentTime(name, flops, moved, max(compute, bandwidth), bound)


def measure_machine(dtype: Dtype = "float32", device: str = "cpu", *, seconds: float = 2.0) -> Machine:
    """Measure the peak of matrix products and the memory's bandwidth, in about so many seconds.

    The peak is the best of several square products, from 256 up to 4096 as the time allows; the bandwidth
    that of adding one large array to another (two reads and a write). Runs with PyTorch's present number of
    threads and precision settings, so that it tells what this process can do.

    Raises:
        ConfigError: a dtype or device that is not there.
    """
    import torch

    names = {"bfloat16_autocast": torch.bfloat16}
    kind = names.get(dtype, getattr(torch, dtype, None))
    if not isinstance(kind, torch.dtype):
        raise ConfigError(f"dtype: {dtype!r} is not known")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: 'cuda' is not available here")
    return Machine(device, dtype, _product_speed(kind, device, seconds / 2), _bandwidth(device, seconds / 2))


def _product_speed(kind: torch.dtype, device: str, seconds: float) -> float:
    """FLOPs a second of the best size, larger ones as long as the time allows."""
    import torch

    best, end = 0.0, time.perf_counter() + seconds
    for n in (256, 512, 1024, 2048, 4096):
        a, b = (torch.randn(n, n, device=device).to(kind) for _ in range(2))
        out = torch.empty(n, n, dtype=kind, device=device)
        took = _fastest(functools.partial(torch.mm, a, b, out=out), device, seconds / 10)
        best = max(best, 2 * n**3 / took)
        # The next size takes eight times as long, and is run four times at least.
        if time.perf_counter() + 32 * took > end:
            break
    return best


def _bandwidth(device: str, seconds: float) -> float:
    import torch

    n = 2**26 if device == "cuda" else 2**24
    a, b, out = (torch.ones(n, device=device) for _ in range(3))
    return 3 * 4 * n / _fastest(lambda: torch.add(a, b, out=out), device, seconds)


def _fastest(run: Callable[[], object], device: str, seconds: float) -> float:
    """The shortest of the runs that go into so many seconds; at least three, after one that warms up."""
    import torch

    def once() -> float:
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    once()
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < 3 or time.perf_counter() < end:
        found.append(once())
    return min(found)
