from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from isoform.errors import ConfigError
from isoform.training import assembly, precision
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


def test_products_are_sent_elsewhere_only_where_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inside: list[str] = []

    def seen(*, avx512: bool, errors: list[float], device: str = "cpu") -> str:
        given = iter(errors)
        monkeypatch.setattr(precision, "_has_avx512_alone", lambda: avx512)
        monkeypatch.setattr(precision, "_error", lambda: next(given))
        with precision.exact_products(torch.device(device)):
            inside.append(torch.get_float32_matmul_precision())
        assert torch.get_float32_matmul_precision() == "highest"
        return inside[-1]

    assert seen(avx512=True, errors=[1e-7, 1.5e-7]) == "medium"
    assert seen(avx512=True, errors=[1e-7, 1e-3]) == "highest"
    assert seen(avx512=False, errors=[]) == "highest"
    assert seen(avx512=True, errors=[], device="meta") == "highest"


def test_the_product_that_is_tried_tells_float32_from_bfloat16() -> None:
    assert precision._error() < 1e-5
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert precision._error() > 1e-3


def test_the_setting_of_a_user_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_has_avx512_alone", lambda: True)
    torch.set_float32_matmul_precision("high")
    try:
        with precision.exact_products(torch.device("cpu")):
            assert torch.get_float32_matmul_precision() == "high"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
