"""One trial step on the largest batch: does it fit, how long does it take, does everything learn."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from isoform.data.batching import Batch, LabelledBatch
from isoform.errors import SupervisionError
from isoform.nn import Transformer
from isoform.training.guard import DivergenceError, first_fault
from isoform.training.learner import Learner
from isoform.training.loss import Work
from isoform.training.supervision import check_fit, check_shift

Context = Callable[[], AbstractContextManager[object]]


@dataclasses.dataclass(frozen=True)
class Trial:
    """What a step on the largest batch of the first epoch came to.

    Attributes:
        rows: rows of the batch.
        tokens: ids in it, padding included.
        supervised: positions that are learnt from.
        loss: mean loss a supervised position, before any learning.
        seconds: forward and backward pass, once warm.
        activation_bytes: what is held for the backward pass (on a CUDA device: the allocator's peak).
        weight_bytes: weights, gradients and the optimizer's two means.
        without_gradient: parameters that this batch does not reach.
    """

    rows: int
    tokens: int
    supervised: int
    loss: float
    seconds: float
    activation_bytes: int
    weight_bytes: int
    without_gradient: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)


def trial_step(
    learner: Learner, batch: Batch | LabelledBatch, device: torch.device, context: Context
) -> Trial:
    """Run one step without updating anything; random state and gradients are left as they were.

    Raises:
        SupervisionError: labels that leak, inputs not shifted exactly once, or nothing supervised.
        ConfigError: a head or structure that does not fit the data.
        DivergenceError: the loss is not finite before anything was learnt.
    """
    model = learner.model
    check_fit(model, batch)
    if isinstance(batch, Batch):
        check_shift(batch)
    work = Work.of(batch, device)
    if work.count == 0:
        raise SupervisionError(
            "the largest batch has no supervised position: there is nothing to learn from it"
        )
    model.train()
    with _own_random_state(device):
        held = _Held(model)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        with held.watch(), context():
            total, _, balance = learner(work)
            loss = total / work.count + balance
        loss.backward()
        value = float(loss.detach())
        if not torch.isfinite(loss):
            cause = first_fault(learner, work, context)
            raise DivergenceError(f"trial step: the loss is {value} before anything was learnt; {cause}")
    missing = tuple(name for name, p in model.named_parameters() if p.requires_grad and p.grad is None)
    # The first pass of a process also sets things up, and is slower than any other.
    seconds = step_seconds(learner, work, device, context, repeats=1)
    model.zero_grad(set_to_none=True)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else held.bytes
    # Weights, and of those that learn gradients and two means besides.
    weights = sum(p.numel() * p.element_size() * (4 if p.requires_grad else 1) for p in model.parameters())
    return Trial(len(batch.rows), batch.padded_tokens(), work.count, value, seconds, peak, weights, missing)


def step_seconds(learner: Learner, work: Work, device: torch.device, context: Context, repeats: int) -> float:
    """Seconds of a forward and backward pass: the least of several."""
    learner.model.train()
    found: list[float] = []
    with _own_random_state(device):
        for _ in range(repeats):
            start = time.perf_counter()
            with context():
                loss, nll, _ = learner(work)
            loss.backward()
            float(nll)  # waits for the device
            found.append(time.perf_counter() - start)
    learner.model.zero_grad(set_to_none=True)
    return min(found)


@contextlib.contextmanager
def _own_random_state(device: torch.device) -> Generator[None]:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


class _Held:
    """Counts the bytes that autograd keeps for the backward pass, weights left out."""

    def __init__(self, model: Transformer) -> None:
        self._weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._seen: dict[int, int] = {}

    @property
    def bytes(self) -> int:
        """The sum over distinct storages."""
        return sum(self._seen.values())

    def watch(self) -> AbstractContextManager[object]:
        """Count inside this context."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._weights:
            self._seen[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()
