"""What a run file may ask for besides plain training; each is held against its formula."""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from isoform.errors import ConfigError
from isoform.training import Learner, Work, smoothed_cross_entropy
from isoform.training.checkpoint import DiskError, Store
from isoform.training.ema import Ema
from isoform.training.log import read_log
from isoform.training.optimizer import adamw, rate_factors
from isoform.training.recompute import recompute_layers
from training import toys
from training.runs import in_step, run, same, settings


def test_z_loss_is_added_with_its_gradient() -> None:
    scores = torch.linspace(-2, 3, 15, dtype=torch.float64).reshape(3, 5).requires_grad_()
    labels = torch.tensor([1, 4, 0])
    loss, nll = smoothed_cross_entropy(scores, labels, 0.1, 0.3)
    (found,) = torch.autograd.grad(loss, scores)
    plain = torch.nn.functional.cross_entropy(scores, labels, reduction="sum", label_smoothing=0.1)
    expected = plain + 0.3 * scores.logsumexp(-1).square().sum()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, torch.autograd.grad(expected, scores)[0])
    torch.testing.assert_close(nll, torch.nn.functional.cross_entropy(scores, labels, reduction="sum"))


def test_frozen_weights_stay_and_the_others_learn(tmp_path: Path) -> None:
    before = {name: p.detach().clone() for name, p in toys.pair_model().named_parameters()}
    _, model = run(tmp_path, dropout=0.0, freeze=("encoder.*", "embedding.*"))
    for name, parameter in model.named_parameters():
        frozen = name.startswith(("encoder.", "embedding."))
        assert torch.equal(parameter, before[name]) == frozen, name


@pytest.mark.parametrize("key", ["freeze", "optimizer.rates"])
def test_a_pattern_that_nothing_has_is_refused(tmp_path: Path, key: str) -> None:
    value: Any = ("decodr.*",) if key == "freeze" else ({"pattern": "decodr.*", "factor": 2.0},)
    with pytest.raises(ConfigError, match=r"nothing is named 'decodr"):
        run(tmp_path, **{key: value})


def test_rates_fall_from_the_top_layer_down() -> None:
    from isoform.nn import build

    model = build(toys.pair_config(layers=2), seed=1)
    rates = ({"pattern": "decoder.final_norm.*", "factor": 5.0},)
    chosen = settings(**{"optimizer.layer_decay": 0.5, "optimizer.rates": rates}).optimizer
    factors = rate_factors(model, chosen)
    assert factors["decoder.layers.1.attention.body.output.weight"] == 1.0
    assert factors["decoder.layers.0.attention.body.output.weight"] == 0.5
    assert factors["encoder.layers.0.attention.body.output.weight"] == 0.5
    assert factors["embedding.weight"] == 0.25 and factors["encoder.final_norm.weight"] == 1.0
    assert factors["decoder.final_norm.weight"] == 5.0
    groups = {id(p): group["factor"] for group in adamw(model, chosen).param_groups for p in group["params"]}
    assert {name: groups[id(p)] for name, p in model.named_parameters()} == factors


def test_the_running_mean_follows_its_formula_and_is_lent() -> None:
    model = toys.pair_model(dtype=torch.float64)
    name, weight = next(iter(model.named_parameters()))
    first, ema = weight.detach().clone(), Ema(model, 0.75)
    with torch.no_grad():
        weight.add_(1.0)
    ema.update()
    torch.testing.assert_close(ema.tensors()[name], first + 0.25)
    with ema.in_place():
        torch.testing.assert_close(weight.detach(), first + 0.25)
    torch.testing.assert_close(weight.detach(), first + 1.0)


def test_layers_computed_again_give_the_same_numbers(tmp_path: Path) -> None:
    _, held = run(tmp_path / "held")
    _, again = run(tmp_path / "again", recompute=True)
    assert same(held, again)
    model, calls = toys.pair_model(dropout=0.2), [0]
    recompute_layers(model, True)
    body = model.decoder.layers[0].feed_forward.body  # type: ignore[union-attr]
    body.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    Learner.of(model, settings())(Work.of(toys.pairs().largest()))[0].backward()
    assert calls == [2]


def test_the_best_checkpoints_are_kept_and_their_mean_competes(tmp_path: Path) -> None:
    result, _ = run(tmp_path, steps=24, validate_every=2, keep=1, keep_best=3, average_best=3)
    seen = [(x.validation_nll, x.step) for x in read_log(tmp_path / "log.csv") if x.validation_nll]
    assert [step for _, step in result.state.ranking] == [step for _, step in sorted(seen)[:3]]
    assert {step for _, step in result.state.ranking} <= set(Store(tmp_path / "checkpoints").steps())
    assert result.validation_nll is not None and result.validation_nll <= min(seen)[0] * (1 + 1e-6)


def test_the_noise_scale_is_logged(tmp_path: Path) -> None:
    run(tmp_path, dropout=0.0, accumulation=3, gradient_noise=True, log_every=1)
    seen = [line.gradient_noise for line in read_log(tmp_path / "log.csv")]
    assert any(value is not None and value > 0 for value in seen)
    with pytest.raises(ConfigError, match="accumulation"):
        settings(gradient_noise=True)


def test_a_full_disk_stops_with_the_last_checkpoint_whole(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk: what is written is cut off in the middle."""
    _, whole = run(tmp_path / "whole")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    narrow = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (6000, limits[1]))  # noqa: E731
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with (
            in_step(8, narrow),
            pytest.raises(DiskError, match=r"cannot be written.*last whole one is of step 6"),
        ):
            run(tmp_path / "full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert not list((tmp_path / "full" / "checkpoints").glob(".*"))
    _, resumed = run(tmp_path / "full")
    assert same(whole, resumed)


def test_a_line_of_the_log_that_finds_no_room_names_its_file(tmp_path: Path) -> None:
    """A device without any room stands for the full disk."""
    full = lambda: (tmp_path / "log.csv").unlink() or (tmp_path / "log.csv").symlink_to("/dev/full")  # noqa: E731
    with (
        in_step(3, full),
        pytest.raises(DiskError, match=r"log\.csv: the line of step 3 cannot be written: No space left"),
    ):
        run(tmp_path)
