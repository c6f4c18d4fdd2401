"""Finding out that a step is not finite without waiting for the device, and saying where it began."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from isoform.data.batching import Batch, LabelledBatch, Position
from isoform.errors import IsoformError
from isoform.training.group import Group
from isoform.training.learner import Learner
from isoform.training.loss import Work

LISTED = 100  # samples named of a batch


class DivergenceError(IsoformError):
    """A loss or gradient that is not finite; names step, batch, samples and the first module concerned."""


@dataclasses.dataclass(frozen=True, eq=False)
class Micro:
    """A micro-batch, where in the data it stands, and its number in the update."""

    batch: Batch | LabelledBatch
    position: Position
    work: Work
    number: int


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """What is needed to run a step again: its micro-batches, and what seeds the draws of each."""

    step: int
    micro: Sequence[Micro]
    draw: Callable[[int], None]


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

    def before(self, step: int, micro: Sequence[Micro], draw: Callable[[int], None]) -> None:
        """Take note of a step about to be made."""
        self._traces.append(Trace(step, micro, draw))

    def after(self, step: int, loss: Tensor, norm: Tensor) -> None:
        """Take note of what it gave, on the device."""
        wrong = ~(torch.isfinite(loss) & torch.isfinite(norm))
        self._first = torch.where((self._first < 0) & wrong, step, self._first)
        self.bad = torch.maximum(self.bad, wrong.to(self.bad.dtype))

    def check(self, learner: Learner, context: Callable[[], Any], group: Group) -> None:
        """Wait for the device and stop, all processes together, if anything was wrong in one.

        Raises:
            DivergenceError: the first step that was not finite.
        """
        traces, self._traces = self._traces, []
        first = int(self._first)
        if group.alone and first < 0:
            return
        steps = [int(row[0]) for row in group.table([first])]
        seen = [step for step in steps if step >= 0]
        if not seen:
            return
        trace = next(t for t in traces if t.step == min(seen))
        if learner.sharded:
            raise DivergenceError(
                f"step {trace.step}: the loss or its gradient is not finite; the last checkpoint is"
                ' untouched; one process, or distributed.strategy = "ddp", says where it began'
            )
        causes = group.gather(_explain(trace, learner, context, self._where))
        known = [cause for cause, found in causes if found]
        raise DivergenceError((known or [cause for cause, _ in causes])[0])


def _explain(
    trace: Trace,
    learner: Learner,
    context: Callable[[], Any],
    where: Callable[[int], str],
) -> tuple[str, bool]:
    """Run the step again with the same dropout and look at every module; and whether that found it."""
    if not trace.micro:
        return f"step {trace.step}: the loss or its gradient is not finite", False
    learner.model.zero_grad(set_to_none=True)
    for micro in trace.micro:
        trace.draw(micro.number)
        cause = first_fault(learner, micro.work, context)
        if cause is not None:
            break
    else:
        micro, cause = trace.micro[-1], None
    said = "it could not be reproduced when the step was run again" if cause is None else cause
    place = f"epoch {micro.position.epoch + 1}, batch {micro.position.batch + 1}"
    text = (
        f"step {trace.step}: the loss or its gradient is not finite ({place};"
        f" {samples(micro.batch.rows, where)}); {said}; the last checkpoint is untouched"
    )
    return text, cause is not None


def first_fault(learner: Learner, work: Work, context: Callable[[], Any]) -> str | None:
    """Where a forward and backward pass first leaves the finite numbers; None when it does not."""
    model = learner.model
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            return f"the weights {name} hold a value that is not finite"
    found: list[str] = []
    handles = [
        module.register_forward_hook(_watch(name, found)) for name, module in model.named_modules() if name
    ]
    try:
        with context():
            loss, _, balance = learner(work)
    finally:
        for handle in handles:
            handle.remove()
    if found:
        return f"the first module whose output is not finite is {found[0]}"
    if not bool(torch.isfinite(loss + balance)):
        return "every module's output is finite, their loss is not"
    (loss / work.count + balance).backward()
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
