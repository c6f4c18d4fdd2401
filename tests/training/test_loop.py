"""Algorithm 6.1 (R30, R34, R35): micro-batches, what is skipped, what stops, which weights stay."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from isoform.errors import ConfigError, SupervisionError
from isoform.training import Constant, DivergenceError, fit, mean_nll, record
from isoform.training.checkpoint import Store
from isoform.training.log import read_log
from isoform.training.optimizer import adamw
from isoform.training.updates import uneven_shares
from training import toys
from training.runs import Fixed, first_moments, joined, plain, run, same, settings, validation


def test_it_learns_and_ends_with_the_best_weights(tmp_path: Path) -> None:
    result, model = run(tmp_path, steps=60, dropout=0.0, validate_every=10, checkpoint_every=30)
    lines = read_log(tmp_path / "log.csv")
    assert result.stop == "steps" and result.finished and result.state.step == 60
    assert lines[-1].train_nll < 0.9 * lines[0].train_nll  # type: ignore[operator]
    seen = [line.validation_nll for line in lines if line.validation_nll is not None]
    assert len(seen) == 6 and result.validation_nll == result.state.best_nll == pytest.approx(min(seen))
    nll, count = mean_nll(model, validation(), torch.device("cpu"), plain)
    assert nll == result.validation_nll
    assert count == sum(len(row) for row in toys.rows(10, 9))
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_log_keeps_losses_apart(tmp_path: Path) -> None:
    run(tmp_path)
    with (tmp_path / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    # Windows end at lines of the log, validations and checkpoints.
    assert [int(row["step"]) for row in rows] == [2, 3, 4, 6, 8, 9, 10, 12]
    assert all(row["train_loss"] != row["train_nll"] for row in rows)
    assert [row["validation_nll"] != "" for row in rows] == [
        False,
        False,
        True,
        False,
        True,
        False,
        False,
        True,
    ]
    assert all(float(row["gradient_norm"]) > 0 and float(row["tokens_per_second"]) > 0 for row in rows)
    assert float(rows[0]["learning_rate"]) == pytest.approx(0.02 * 2 / 4)


@pytest.mark.parametrize("accumulation", [2, 3])
def test_micro_batches_of_unequal_padding_equal_one_large_batch(tmp_path: Path, accumulation: int) -> None:
    """The sum of all losses over the number of all supervised positions, not a mean of means."""
    source = list(toys.pairs(max_tokens=40).epoch(0))[:accumulation]
    assert len({int(batch.supervised.sum()) for batch in source}) > 1
    whole = joined(source)
    models = [toys.pair_model(dtype=torch.float64) for _ in range(2)]
    # Key biases have no gradient but rounding, which a small eps would blow up.
    common: dict[str, Any] = {"steps": 3, "precision": "float64", "optimizer.eps": 0.01, "clip_norm": 0.5}
    micro = settings(accumulation=accumulation, **common)
    fit(models[0], Fixed(source), None, micro, tmp_path / "a", quiet=True)
    fit(models[1], Fixed([whole]), None, settings(**common), tmp_path / "b", quiet=True)
    for x, y in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_batches_without_supervision_are_skipped_and_counted(tmp_path: Path) -> None:
    batches = list(toys.pairs().epoch(0))[:3]
    empty = dataclasses.replace(batches[1], supervised=torch.zeros_like(batches[1].supervised))
    with_empty, without = toys.pair_model(), toys.pair_model()
    changes: dict[str, Any] = {"steps": 4, "validate_every": None}
    mixed, chosen = Fixed([batches[0], empty, batches[2]]), settings(**changes)
    found = fit(with_empty, mixed, None, chosen, tmp_path / "a", quiet=True)
    fit(without, Fixed([batches[0], batches[2]]), None, settings(**changes), tmp_path / "b", quiet=True)
    assert found.state.skipped == 2
    assert same(with_empty, without)


def test_data_without_any_supervision_end_the_run(tmp_path: Path) -> None:
    batch = next(toys.pairs().epoch(0))
    empty = dataclasses.replace(batch, supervised=torch.zeros_like(batch.supervised))
    with pytest.raises(SupervisionError, match="whole epoch"):
        fit(toys.pair_model(), Fixed([empty], largest=batch), None, settings(), tmp_path, quiet=True)


def test_only_matrices_decay() -> None:
    model = toys.pair_model()
    optimizer = adamw(model, settings(**{"optimizer.weight_decay": 0.3}).optimizer)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {decays[id(p)] for p in model.parameters() if p.dim() >= 2} == {0.3}
    assert {decays[id(p)] for p in model.parameters() if p.dim() < 2} == {0.0}


def test_clipping_limits_the_gradient(tmp_path: Path) -> None:
    """AdamW forgets a constant factor, so the limit is seen in the moments."""
    lengths: list[float] = []
    for limit in (1e-3, None):
        folder = tmp_path / str(limit)
        chosen = settings(steps=1, clip_norm=limit)
        fit(toys.pair_model(), toys.pairs(), None, chosen, folder, quiet=True)
        lengths.append(float(first_moments(folder, 1).norm()))
    assert lengths[0] == pytest.approx((1 - 0.9) * 1e-3, rel=1e-3)
    assert lengths[1] > 10 * lengths[0]


def test_epochs_count_every_batch(tmp_path: Path) -> None:
    train = toys.pairs()
    batches = train.count(0) + train.count(1)
    result, _ = run(tmp_path, steps=None, epochs=2, accumulation=2)
    assert result.state.step == -(-batches // 2)


def test_patience(tmp_path: Path) -> None:
    """At a rate of nothing, validation does not improve after the first time."""
    result, _ = run(
        tmp_path, steps=500, patience=2, validate_every=2, dropout=0.0, schedule=Constant(lr=1e-30)
    )
    assert result.stop == "patience"
    assert result.state.step == 6 and result.state.best_step == 2
    again, _ = run(
        tmp_path, steps=500, patience=2, validate_every=2, dropout=0.0, schedule=Constant(lr=1e-30)
    )
    assert again.stop == "patience" and again.state.step == 6


def test_a_run_that_time_has_ended_ends_at_once_when_it_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the last update was saved before the time was up."""
    changes: dict[str, Any] = {"steps": None, "max_seconds": 0.5}
    changes |= {"checkpoint_every": 1, "log_every": 1, "validate_every": 1}
    saved = Store(tmp_path / "checkpoints").steps
    monkeypatch.setattr(record.Record, "seconds", lambda self: 0.6 if 3 in saved() else 0.4)
    result, _ = run(tmp_path, **changes)
    assert result.stop == "max_seconds" and result.state.step == 3 and result.state.seconds >= 0.5
    monkeypatch.setattr(record.Record, "seconds", lambda self: self._before + 0.1 * (self.state.step - 3))
    again, _ = run(tmp_path, **changes)
    assert again.state.step == 3


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    _, first = run(tmp_path / "a")
    torch.rand(7)
    _, second = run(tmp_path / "b")
    _, other = run(tmp_path / "c", label_smoothing=0.2)
    assert same(first, second) and not same(first, other)


def test_the_mean_of_the_last_checkpoints_competes(tmp_path: Path) -> None:
    result, model = run(
        tmp_path, steps=60, average_last=3, checkpoint_every=5, validate_every=10, dropout=0.3
    )
    store = Store(tmp_path / "checkpoints")
    assert {50, 55, 60} <= set(store.steps())
    mean = store.average([50, 55, 60])
    name = "decoder.layers.0.feed_forward.body.up.weight"
    expected = torch.stack([store.weights(step)[name].double() for step in (50, 55, 60)]).mean(0).float()
    assert torch.equal(mean[name], expected)
    nll, _ = mean_nll(model, validation(), torch.device("cpu"), plain)
    assert nll == result.validation_nll
    chosen = mean if result.weights == "average" else store.weights(result.state.best_step or 0)
    assert torch.equal(dict(model.named_parameters())[name], chosen[name])
    assert result.state.best_nll is not None and nll <= result.state.best_nll


def test_what_needs_validation_asks_for_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="validation part"):
        fit(toys.pair_model(), toys.pairs(), None, settings(patience=1), tmp_path, quiet=True)


def test_leaks_are_refused_before_the_first_step(tmp_path: Path) -> None:
    batch = next(toys.pairs().epoch(0))
    leaking = dataclasses.replace(
        batch, decoder_input=dataclasses.replace(batch.decoder_input, ids=batch.labels)
    )
    with pytest.raises(SupervisionError, match="leaks"):
        fit(toys.pair_model(), Fixed([leaking]), None, settings(), tmp_path, quiet=True)
    assert not (tmp_path / "checkpoints").exists()


def test_a_gradient_that_is_not_finite_stops_and_is_named(tmp_path: Path) -> None:
    model = toys.pair_model()
    broken = model.decoder.layers[0].feed_forward.body  # type: ignore[union-attr]
    calls = [0]

    def poison(module: object, inputs: object, output: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        # Two calls are the trial's; from the sixth update on something overflows.
        return output * torch.inf if calls[0] > 7 else output

    broken.register_forward_hook(poison)
    where = "toy.tsv, line {}".format
    changes = settings(validate_every=None)
    with pytest.raises(DivergenceError) as caught:
        fit(model, toys.pairs(), None, changes, tmp_path, where=where, quiet=True)
    message = str(caught.value)
    batch = list(toys.pairs().epoch(0))[5]
    lines = ", ".join(map(str, batch.rows.tolist()))
    assert "step 6" in message and "epoch 1, batch 6" in message
    assert f"toy.tsv, line {lines}" in message
    assert "decoder.layers.0.feed_forward.body" in message
    assert Store(tmp_path / "checkpoints").latest()[0] == 3
    for parameter in model.parameters():
        assert bool(torch.isfinite(parameter).all())


def test_a_backward_pass_that_is_not_finite_is_named(tmp_path: Path) -> None:
    model = toys.pair_model()
    weight = model.decoder.layers[0].feed_forward.body.up.weight  # type: ignore[union-attr]
    calls = [0]

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return gradient * torch.nan if calls[0] > 4 else gradient

    weight.register_hook(poison)
    with pytest.raises(
        DivergenceError, match=r"step 3.*belongs to decoder\.layers\.0\.feed_forward\.body\.up"
    ):
        fit(model, toys.pairs(), None, settings(validate_every=None), tmp_path, quiet=True)


def test_a_validation_that_is_not_finite_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "mean_nll", lambda *arguments, **named: (float("nan"), 1))
    with pytest.raises(DivergenceError, match="after step 4 the validation NLL is nan"):
        run(tmp_path)


def test_without_validation_the_last_weights_stay(tmp_path: Path) -> None:
    model = toys.pair_model()
    chosen = settings(steps=7, checkpoint_every=5, log_every=3)
    result = fit(model, toys.pairs(), None, chosen, tmp_path, quiet=True)
    assert result.weights == "last" and result.validation_nll is None
    store = Store(tmp_path / "checkpoints")
    weights = store.weights(7)
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert [line.step for line in read_log(tmp_path / "log.csv")][-1] == 7
    before = store.path(7).stat().st_ino
    fit(toys.pair_model(), toys.pairs(), None, chosen, tmp_path, quiet=True)
    assert store.path(7).stat().st_ino == before


@pytest.mark.soak
@pytest.mark.filterwarnings("default:The .grad attribute")  # the compiler hides it where it is no error
def test_compiled_stacks_learn_the_same(tmp_path: Path) -> None:
    losses = []
    for flag in (False, True):
        model = toys.pair_model()
        chosen = settings(steps=3, compile=flag)
        fit(model, toys.pairs(), None, chosen, tmp_path / str(flag), quiet=True)
        losses.append([line.train_nll for line in read_log(tmp_path / str(flag) / "log.csv")])
        assert model.decoder is not None and model.decoder._compiled_call_impl is None
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_processes_that_wait_in_every_update_are_told_of() -> None:
    assert uneven_shares(1, 1) is None and uneven_shares(4, 2) is None
    assert "the only micro-batch" in (uneven_shares(1, 2) or "")
    assert "the 3 micro-batches" in (uneven_shares(3, 4) or "")
    assert (uneven_shares(3, 4) or "").endswith("a multiple of 4")
