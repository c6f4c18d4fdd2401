from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch

from isoform.errors import SupervisionError
from isoform.training import DivergenceError, trial_step
from isoform.training.learner import Learner
from training import toys

CPU = torch.device("cpu")


def trial(model: Any, batch: Any = None, smoothing: float = 0.0) -> Any:
    chosen = toys.pairs().largest() if batch is None else batch
    learner = Learner(model, smoothing=smoothing, z_loss=0.0)
    return trial_step(learner, chosen, CPU, contextlib.nullcontext)


def test_it_leaves_everything_as_it_was() -> None:
    model = toys.pair_model(dropout=0.3)
    weights = [p.clone() for p in model.parameters()]
    state = torch.get_rng_state()
    found = trial(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(weights, model.parameters(), strict=True))
    assert found.supervised < found.tokens and found.loss > 0 and found.without_gradient == ()


def test_it_counts_what_is_held_for_the_backward_pass() -> None:
    """Twice the rows hold twice the activations; weights are not among them."""
    batch = next(toys.pairs(max_tokens=400).epoch(0))
    twice = dataclasses.replace(
        batch,
        decoder_input=batch.decoder_input.select(_twice(batch)),
        labels=batch.labels[_twice(batch)],
        supervised=batch.supervised[_twice(batch)],
        rows=batch.rows[_twice(batch)],
        source=batch.source.select(_twice(batch)),  # type: ignore[union-attr]
    )
    one, two = trial(toys.pair_model(), batch), trial(toys.pair_model(), twice)
    assert two.activation_bytes == pytest.approx(2 * one.activation_bytes, rel=0.05)
    assert one.weight_bytes == 16 * sum(p.numel() for p in toys.pair_model().parameters())


def _twice(batch: Any) -> torch.Tensor:
    return torch.arange(len(batch.rows)).repeat(2)


def test_parameters_that_nothing_reaches_are_named() -> None:
    model = toys.pair_model()
    model.register_parameter("stray", torch.nn.Parameter(torch.zeros(2)))
    assert trial(model).without_gradient == ("stray",)


def test_an_infinite_loss_is_named_before_the_first_step() -> None:
    model = toys.pair_model()
    with torch.no_grad():
        model.embedding.weight[4] = torch.nan
    with pytest.raises(DivergenceError, match=r"trial step.*weights embedding\.weight"):
        trial(model)


def test_nothing_supervised() -> None:
    batch = toys.pairs().largest()
    with pytest.raises(SupervisionError, match="no supervised position"):
        trial(toys.pair_model(), dataclasses.replace(batch, supervised=torch.zeros_like(batch.supervised)))
