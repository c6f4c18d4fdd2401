"""What a run leaves to look at; smoothed loss and NLL are two columns (R34)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    package = types.SimpleNamespace(init=lambda **given: begun.append(given) or run, Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", package)
    for step in (1, 2):
        log = WandBLog(tmp_path, WandB(project="dates", mode="offline"), {"seed": 4}, quiet=True)
        log.write(line(step, validation_nll=2.5))
        log.close()
    assert [(step, found["validation_nll"]) for found, step in logged] == [(1, 2.5), (2, 2.5)]
    assert "balance_loss" not in logged[0][0]
    assert begun[0]["id"] == begun[1]["id"] and begun[0]["project"] == "dates"
    assert begun[0]["config"] == {"seed": 4} and begun[0]["settings"] == {"console": "off", "silent": True}


def test_without_wandb_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"isoform\[wandb\]"):
        WandBLog(tmp_path, WandB(project="dates"), {}, quiet=True)


KEPT = """
import sys
from pathlib import Path
from training.runs import run, signalled
changes = {"wandb": {"project": "toys", "mode": "offline"}, "validate_every": 6}
with signalled(7):
    assert run(Path(sys.argv[1]), **changes)[0].stop == "signal"
assert run(Path(sys.argv[1]), **changes)[0].stop == "steps"
"""


def records(content: bytes) -> Iterator[bytes]:
    """Those of a log in LevelDB's form: blocks of 32 KiB, each piece after its checksum, length and kind."""
    at, held = 7, b""
    while at + 7 <= len(content):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        held += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            yield held
            held = b""


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb")
def test_what_wandb_keeps_offline_is_the_log(tmp_path: Path) -> None:
    """The package itself, in a process of its own: one run in two parts, stopped and gone on with."""
    from wandb.proto import wandb_internal_pb2  # type: ignore[import-not-found]

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "WANDB_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", KEPT, str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not done.stdout and not done.stderr
    found: dict[int, dict[str, float]] = {}
    begun: list[Any] = []
    for path in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")):
        for content in records(path.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(content)
            if record.HasField("run"):
                begun.append(record.run)
            if record.HasField("history"):
                items = {i.key or i.nested_key[0]: json.loads(i.value_json) for i in record.history.item}
                found[record.history.step.num] = items
    assert [run.project for run in begun] == ["toys"] * 2 and begun[0].run_id == begun[1].run_id
    config = {item.key: json.loads(item.value_json) for item in begun[0].config.update}
    assert config["seed"] == 4 and config["schedule"]["lr"] == 0.02
    lines = read_log(tmp_path / "log.csv")
    assert [line.step for line in lines] == sorted(found)
    for line in lines:
        for name in ("train_nll", "validation_nll", "learning_rate", "gradient_norm"):
            value = getattr(line, name)
            assert (value is None) == (name not in found[line.step])
            if value is not None:
                assert found[line.step][name] == pytest.approx(value, rel=1e-6)
