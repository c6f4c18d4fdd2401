"""Finding out that a step is not finite without waiting for the device, and saying where it began."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from isoform.data.batching import Batch, LabelledBatch, Position
from isoform.errors import IsoformError
from isoform.nn import Transformer
from isoform.training.loss import Work, batch_loss

LISTED = 100  # samples named of a batch


class DivergenceError(IsoformError):
    """A loss or gradient that is not finite; names step, batch, samples and the first module concerned."""


@dataclasses.dataclass(frozen=True, eq=False)
class Micro:
    """A micro-batch and where in the data it stands."""

    batch: Batch | LabelledBatch
    position: Position
    work: Work


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """What is needed to run a step again: its micro-batches and the random state before it."""

    step: int
    micro: Sequence[Micro]
    random: Tensor


class Guard:
    """Watches loss and gradient of every update.

    From the first update that is not finite on, `bad` is 1; the optimizer is given it and leaves the weights
    as they are, so that the cause can still be found when the device is next waited for. On a CPU, which is
    never ahead, that is at once.

    Args:
        device: where the run computes.
        where: names the sample of a row, for messages.
    """

    def __init__(self, device: torch.device, where: Callable[[int], str]) -> None:
        self.device, self._where = device, where
        self.bad = torch.zeros((), device=device)
        self._first = torch.full((), -1, dtype=torch.long, device=device)
        self._traces: list[Trace] = []

    def before(self, step: int, micro: Sequence[Micro]) -> None:
        """Take note of a step about to be made."""
        self._traces.append(Trace(step, micro, _random(self.device)))

    def after(self, step: int, loss: Tensor, norm: Tensor) -> None:
        """Take note of what it gave, on the device."""
        wrong = ~(torch.isfinite(loss) & torch.isfinite(norm))
        self._first = torch.where((self._first < 0) & wrong, step, self._first)
        self.bad = torch.maximum(self.bad, wrong.to(self.bad.dtype))

    def check(self, model: Transformer, context: Callable[[], Any], smoothing: float) -> None:
        """Wait for the device and stop if anything was wrong.

        Raises:
            DivergenceError: the first step that was not finite.
        """
        traces, self._traces = self._traces, []
        first = int(self._first)
        if first >= 0:
            trace = next(t for t in traces if t.step == first)
            raise DivergenceError(_explain(trace, model, context, smoothing, self._where, self.device))


def _random(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _explain(
    trace: Trace,
    model: Transformer,
    context: Callable[[], Any],
    smoothing: float,
    where: Callable[[int], str],
    device: torch.device,
) -> str:
    """Run the step again with the same dropout and look at every module."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(trace.random, device)
    else:
        torch.set_rng_state(trace.random)
    model.zero_grad(set_to_none=True)
    for micro in trace.micro:
        if micro.work.count == 0:
            continue
        cause = first_fault(model, micro.work, context, smoothing)
        if cause is not None:
            break
    else:
        micro, cause = trace.micro[-1], "it could not be reproduced when the step was run again"
    place = f"epoch {micro.position.epoch + 1}, batch {micro.position.batch + 1}"
    return (
        f"step {trace.step}: the loss or its gradient is not finite ({place};"
        f" {samples(micro.batch.rows, where)}); {cause}; the last checkpoint is untouched"
    )


def first_fault(model: Transformer, work: Work, context: Callable[[], Any], smoothing: float) -> str | None:
    """Where a forward and backward pass first leaves the finite numbers; None when it does not."""
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            return f"the weights {name} hold a value that is not finite"
    found: list[str] = []
    handles = [
        module.register_forward_hook(_watch(name, found)) for name, module in model.named_modules() if name
    ]
    try:
        with context():
            sums = batch_loss(model, work, smoothing=smoothing)
    finally:
        for handle in handles:
            handle.remove()
    if found:
        return f"the first module whose output is not finite is {found[0]}"
    if not bool(torch.isfinite(sums.loss + sums.balance)):
        return "every module's output is finite, their loss is not"
    (sums.loss / work.count + sums.balance).backward()
    # Backward visits the modules in reverse: the last in order is the first concerned.
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
            return f"the forward pass is finite; the first gradient that is not belongs to {name}"
    return None


def samples(rows: Tensor, where: Callable[[int], str]) -> str:
    """The places of a batch's samples, numbers of one file together."""
    groups: dict[str, list[str]] = {}
    for row in rows[:LISTED].tolist():
        prefix, _, number = where(row).rpartition(" ")
        groups.setdefault(prefix, []).append(number)
    named = "; ".join(f"{prefix} {', '.join(numbers)}" for prefix, numbers in groups.items())
    return f"{named} and {len(rows) - LISTED} more" if len(rows) > LISTED else named


def _watch(name: str, found: list[str]) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        tensors = [output] if isinstance(output, Tensor) else [o for o in output if isinstance(o, Tensor)]
        if any(t.is_floating_point() and not bool(torch.isfinite(t).all()) for t in tensors):
            found.append(name)

    return hook
