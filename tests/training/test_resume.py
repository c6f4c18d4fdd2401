from __future__ import annotations

import multiprocessing
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from isoform.errors import ArtifactError, ConfigError
from isoform.training import fit, record
from isoform.training.checkpoint import Store
from training import toys
from training.runs import (
    LONG,
    figures,
    in_a_process,
    in_step,
    last_state,
    run,
    same,
    settings,
    stopped_after,
    validation,
)


def test_resuming_gives_the_very_same_numbers(tmp_path: Path) -> None:
    _, whole = run(tmp_path / "whole")
    halves = tmp_path / "halves"
    stopped_after(5, halves)
    _, resumed = run(halves)
    assert same(whole, resumed)
    assert figures(tmp_path / "whole") == figures(halves)


def test_a_damaged_checkpoint_is_passed_over_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, whole = run(tmp_path / "whole")
    folder = tmp_path / "damaged"
    stopped_after(8, folder)
    store = Store(folder / "checkpoints")
    newest = store.steps()[-1]
    assert newest == 8
    path = store.path(newest) / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    step, remarks = store.latest()
    assert step == 6
    assert len(remarks) == 1 and "step-00000008" in remarks[0] and "optimizer.safetensors" in remarks[0]
    (store.path(6) / "complete.json").unlink()
    model = toys.pair_model(dropout=0.2)
    fit(
        model,
        toys.pairs(),
        validation(),
        settings(),
        folder,
        where="toy.tsv, line {}".format,
    )
    assert same(whole, model)
    said = capsys.readouterr().err
    assert "step-00000006: complete.json is missing" in said and "resuming after step 4" in said


@pytest.mark.parametrize(("keep_best", "weights", "step", "nll"), [(2, "best", 8, 2.0), (1, "last", 12, 4.0)])
def test_a_run_does_not_end_with_a_damaged_best_checkpoint(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    keep_best: int,
    weights: str,
    step: int,
    nll: float,
) -> None:
    """Of three validations the first is best; what it chose is cut short before the end."""
    told = iter([1.0, 2.0, 3.0, 4.0])
    monkeypatch.setattr(record, "mean_nll", lambda *_, **__: (next(told), 1))
    store = Store(tmp_path / "checkpoints")

    def damage() -> None:
        path = store.path(4) / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-9])

    model, chosen = toys.pair_model(dropout=0.2), settings(keep_best=keep_best, keep=1)
    with in_step(12, damage):
        result = fit(model, toys.pairs(), validation(), chosen, tmp_path)
    assert (result.weights, result.validation_nll) == (weights, nll)
    assert all(torch.equal(p, store.weights(step)[name]) for name, p in model.named_parameters())
    assert (
        "step-00000004: model.safetensors is truncated or damaged; it is left out" in capsys.readouterr().err
    )


def test_without_a_whole_checkpoint_there_is_no_resuming(tmp_path: Path) -> None:
    stopped_after(4, tmp_path)
    store = Store(tmp_path / "checkpoints")
    for step in store.steps():
        (store.path(step) / "state.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"none of its . checkpoints is whole"):
        run(tmp_path)


def test_what_an_interrupted_write_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "checkpoints" / ".step-00000003.0123abcd.tmp"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    run(tmp_path)
    assert not left.exists()


def test_other_settings_are_refused_in_words(tmp_path: Path) -> None:
    run(tmp_path)
    with pytest.raises(ConfigError, match=r"label_smoothing.*0\.1 in the first, 0\.3 in the second"):
        run(tmp_path, label_smoothing=0.3)
    with pytest.raises(ConfigError, match="begun with another configuration"):
        run(tmp_path, dropout=0.0)


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    _, model = run(tmp_path)
    assert model.tied()
    names = set(Store(tmp_path / "checkpoints").weights(12))
    assert names == {name for name, _ in model.named_parameters()}


def test_old_checkpoints_go_and_the_best_stays(tmp_path: Path) -> None:
    result, _ = run(tmp_path, steps=30, validate_every=2, checkpoint_every=3, keep=2)
    steps = Store(tmp_path / "checkpoints").steps()
    assert len(steps) <= 4 and steps[-1] == 30 and result.state.best_step in steps


# Processes: forked from a server that has only imported things, so that each starts at once.

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["isoform.training", "matplotlib.figure", "matplotlib.backends.backend_agg", "safetensors.torch"]
)


def start(folder: Path) -> Any:
    process = FORKS.Process(target=in_a_process, args=(folder,))
    process.start()
    return process


def finish(folder: Path) -> None:
    process = start(folder)
    process.join()
    assert process.exitcode == 0


def wait_for(folder: Path, step: int, process: Any) -> None:
    store = Store(folder / "checkpoints")
    while process.is_alive() and (store.steps() or [0])[-1] < step:
        time.sleep(0.002)


def test_killed_at_any_moment_it_ends_with_the_same_weights(tmp_path: Path) -> None:
    finish(tmp_path / "whole")
    folder, chance = tmp_path / "killed", random.Random(7)
    for step in (4, 14, 24):
        process = start(folder)
        wait_for(folder, step, process)
        time.sleep(chance.uniform(0.0, 0.02))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    finish(folder)
    last = Store(folder / "checkpoints").weights(40)
    expected = Store(tmp_path / "whole" / "checkpoints").weights(40)
    assert all(torch.equal(last[name], expected[name]) for name in expected)
    assert figures(folder) == figures(tmp_path / "whole")


def test_a_second_process_is_refused_and_a_signal_saves(tmp_path: Path) -> None:
    process = start(tmp_path)
    wait_for(tmp_path, 4, process)
    with pytest.raises(ConfigError, match="another process"):
        run(tmp_path)
    process.terminate()
    process.join()
    assert process.exitcode == 0
    assert 4 <= last_state(tmp_path)["step"] < 40
    result, _ = run(tmp_path, **LONG)
    assert result.finished and result.state.step == 40
