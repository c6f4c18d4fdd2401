from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from isoform.errors import ConfigError
from isoform.training import assembly
from isoform.training.precision import autocast, choose, device_of
from training.runs import run


def test_auto_keeps_the_faster_one() -> None:
    seconds = {"float32": 1.0, "bfloat16_autocast": 0.5}
    assert choose("auto", seconds.__getitem__) == ("bfloat16_autocast", seconds)
    seconds["bfloat16_autocast"] = 0.99  # too little gained for the rounding
    assert choose("auto", seconds.__getitem__)[0] == "float32"

    def never(precision: str) -> float:
        raise AssertionError("measured although the setting is given")

    assert choose("float64", never) == ("float64", {})


def test_auto_is_measured_once_and_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = run(tmp_path, precision="auto", steps=2)
    path = tmp_path / "precision.json"
    assert json.loads(path.read_text())["precision"] == result.precision
    path.write_text(json.dumps({"precision": "bfloat16_autocast", "seconds_per_step": {}}))
    monkeypatch.setattr(assembly, "choose", None)
    assert run(tmp_path, precision="auto", steps=2)[0].precision == "bfloat16_autocast"


def test_autocast_computes_in_half_precision_and_keeps_the_weights(tmp_path: Path) -> None:
    with autocast("bfloat16_autocast", torch.device("cpu")):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    result, model = run(tmp_path, precision="bfloat16_autocast")
    assert result.precision == "bfloat16_autocast" and result.finished
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_devices_that_are_not_there() -> None:
    assert device_of("cpu").type == "cpu"
    for name in ("cpux", "cuda:17"):
        with pytest.raises(ConfigError, match=rf"training\.device: '{name}' cannot be used"):
            device_of(name)
