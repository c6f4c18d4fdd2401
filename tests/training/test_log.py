"""What a run leaves to look at; smoothed loss and NLL are two columns (R34)."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from isoform.errors import ConfigError
from isoform.training.log import CsvLog, Line, TensorBoardLog, WandBLog, read_log
from isoform.training.picture import draw_losses
from isoform.training.settings import WandB


def line(step: int, **changes: float | None) -> Line:
    values: dict[str, float | None] = {
        "epoch": 0.5, "seconds": 1.25, "train_loss": 3.5, "train_nll": 3.0, "validation_nll": None,
        "balance_loss": None, "learning_rate": 1e-3, "gradient_norm": 2.0, "tokens_per_second": 100.0,
    }  # fmt: skip
    return Line(step=step, **{**values, **changes})  # type: ignore[arg-type]


def test_lines_come_back(tmp_path: Path) -> None:
    log = CsvLog(tmp_path / "log.csv", 0)
    lines = [line(1), line(2, validation_nll=2.875, train_nll=None)]
    for item in lines:
        log.write(item)
    assert read_log(tmp_path / "log.csv") == lines


def test_what_an_interrupted_run_wrote_too_much_is_taken_out(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    log = CsvLog(path, 0)
    for step in (1, 2, 3):
        log.write(line(step))
    with path.open("a") as file:
        file.write("4,0.5,1.2")  # cut off by a crash
    resumed = CsvLog(path, 2)
    resumed.write(line(3, train_nll=2.5))
    assert [(item.step, item.train_nll) for item in read_log(path)] == [(1, 3.0), (2, 3.0), (3, 2.5)]
    CsvLog(path, 0)
    assert read_log(path) == []


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = TensorBoardLog(tmp_path, 0)
    log.write(line(1, validation_nll=2.5))
    log.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert {"train_loss", "train_nll", "validation_nll"} <= set(events.Tags()["scalars"])
    assert events.Scalars("validation_nll")[0].value == 2.5


def test_without_tensorboard_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"isoform\[tensorboard\]"):
        TensorBoardLog(tmp_path, 0)


def test_the_picture_of_an_empty_log(tmp_path: Path) -> None:
    draw_losses([], tmp_path / "loss.png", best_step=None)
    assert (tmp_path / "loss.png").stat().st_size > 1000


def test_wandb_gets_every_line_under_its_step_and_one_run_for_all_resumptions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the package, which would want an account."""
    begun: list[dict[str, object]] = []
    logged: list[tuple[dict[str, float], int]] = []
    run = types.SimpleNamespace(log=lambda found, step: logged.append((found, step)), finish=lambda: None)
    package = types.SimpleNamespace(init=lambda **given: begun.append(given) or run)
    monkeypatch.setitem(sys.modules, "wandb", package)
    for step in (1, 2):
        log = WandBLog(tmp_path, WandB(project="dates", mode="offline"))
        log.write(line(step, validation_nll=2.5))
        log.close()
    assert [(step, found["validation_nll"]) for found, step in logged] == [(1, 2.5), (2, 2.5)]
    assert "balance_loss" not in logged[0][0]
    assert begun[0]["id"] == begun[1]["id"] and begun[0]["project"] == "dates"


def test_without_wandb_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"isoform\[wandb\]"):
        WandBLog(tmp_path, WandB(project="dates"))
