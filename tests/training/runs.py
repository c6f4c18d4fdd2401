"""Small runs, ways to interrupt them, and what they left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import unittest.mock
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from isoform.data.batching import Batch, BucketReport, shift_right
from isoform.data.batching_config import TokenBudget
from isoform.nn import Transformer
from isoform.tokens import Tokens
from isoform.training import FitResult, InverseSqrt, Training, fit, loop
from isoform.training.checkpoint import Store
from isoform.training.log import read_log
from training import toys

WHERE = "toy.tsv, line {}".format
LONG = {"steps": 40, "checkpoint_every": 4, "validate_every": 6}
plain = contextlib.nullcontext


def settings(**changes: Any) -> Training:
    base = Training(
        seed=4,
        steps=12,
        batches=TokenBudget(max_tokens=60, pool=64),
        schedule=InverseSqrt(lr=0.02, warmup=4),
        validate_every=4,
        checkpoint_every=3,
        keep=4,
        log_every=2,
        label_smoothing=0.1,
    )
    return base.replace(**changes)


def validation() -> Any:
    return toys.pairs(10, seed=9, shuffle=None)


def run(folder: Path, *, dropout: float = 0.2, **changes: Any) -> tuple[FitResult, Transformer]:
    model = toys.pair_model(dropout=dropout)
    chosen = settings(**changes)
    result = fit(model, toys.pairs(), validation(), chosen, folder, where=WHERE, quiet=True)
    return result, model


def in_a_process(folder: Path) -> None:
    """What other processes do."""
    torch.set_num_threads(1)
    run(folder, **LONG)


def same(a: Transformer, b: Transformer) -> bool:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def first_moments(folder: Path, step: int) -> torch.Tensor:
    from safetensors.torch import load_file

    tensors = load_file(Store(folder / "checkpoints").path(step) / "optimizer.safetensors")
    return torch.cat([value.flatten() for name, value in tensors.items() if name.startswith("exp_avg.")])


def last_state(folder: Path) -> dict[str, Any]:
    store = Store(folder / "checkpoints")
    return json.loads((store.path(store.steps()[-1]) / "state.json").read_text())["state"]


def figures(folder: Path) -> list[tuple[Any, ...]]:
    """The log without its times."""
    return [
        (x.step, x.epoch, x.train_loss, x.train_nll, x.validation_nll, x.learning_rate, x.gradient_norm)
        for x in read_log(folder / "log.csv")
    ]


def stopped_after(step: int, folder: Path) -> None:
    """Run until a signal comes in the middle of a step."""
    model = toys.pair_model(dropout=0.2)
    with signalled(step):
        result = fit(model, toys.pairs(), validation(), settings(), folder, where=WHERE, quiet=True)
    assert result.stop == "signal" and result.signal == signal.SIGTERM and not result.finished
    assert last_state(folder)["step"] == step


@contextlib.contextmanager
def in_step(step: int, act: Callable[[], object]) -> Iterator[None]:
    """Something happens in the middle of a step."""
    true = loop.rate

    def rate(schedule: Any, now: int, **given: Any) -> float:
        if now == step:
            act()
        return true(schedule, now, **given)

    with unittest.mock.patch.object(loop, "rate", rate):
        yield


def signalled(step: int) -> contextlib.AbstractContextManager[None]:
    """This process gets a SIGTERM in the middle of a step."""
    return in_step(step, lambda: os.kill(os.getpid(), signal.SIGTERM))


class Fixed:
    """The same batches in every epoch."""

    def __init__(self, batches: list[Batch], largest: Batch | None = None) -> None:
        self.batches, self._largest = batches, largest or batches[0]

    def count(self, epoch: int) -> int:
        return len(self.batches)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        yield from self.batches[start:]

    def report(self, epoch: int) -> BucketReport:
        return BucketReport(len(self.batches), 0, 0, 0)

    def largest(self) -> Batch:
        return self._largest


def joined(batches: list[Batch]) -> Batch:
    """All rows in one batch, padded to the longest of all."""
    sources = [row for batch in batches for row in batch.source.rows()]  # type: ignore[union-attr]
    targets = [
        labels[keep].tolist()
        for batch in batches
        for labels, keep in zip(batch.labels, batch.supervised, strict=True)
    ]
    padded = Tokens.from_lists(targets, pad_id=toys.PAD)
    inputs, labels = shift_right(padded.ids, toys.BOS)
    return Batch(
        Tokens(inputs, padded.real, layout=padded.layout),
        labels,
        padded.real_or_ones(),
        torch.cat([batch.rows for batch in batches]),
        Tokens.from_lists(sources, pad_id=toys.PAD),
    )
