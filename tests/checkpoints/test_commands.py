"""``isoform import`` and ``isoform export``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isoform.checkpoints import Bundle, export, load
from isoform.cli import main
from isoform.config import presets
from isoform.config.protocol import Protocol
from isoform.nn import build


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    cfg = presets.llama(40, d_model=16, n_heads=4, n_kv_heads=2, ffn_width=12, n_layers=2, eps=1e-5)
    protocol = Protocol(pad_id=0, eos_ids=(2,), start=(1,))
    return export(Bundle(build(cfg, seed=0).eval(), cfg, None, None, protocol, {}), tmp_path / "hf")


def test_there_and_back(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    artifact, back = tmp_path / "artifact", tmp_path / "back"
    assert main(["import", str(checkpoint), str(artifact), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["tensors_bit_equal"] == 21
    assert answer["probe"]["worst_layer"][1] == 0.0
    assert load(artifact, check=True).provenance["import_check"] == {"tensors_bit_equal": 21}
    assert main(["export", str(artifact), str(back), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["check"]["probe"]["tokens"] > 0
    assert (back / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()


def test_words(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", str(checkpoint), str(tmp_path / "a"), "--dtype", "bfloat16"]) == 0
    out = capsys.readouterr().out
    assert "layers agree" in out
    assert f"wrote {tmp_path / 'a'}" in out


def test_bad_input(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", str(tmp_path / "nowhere"), str(tmp_path / "a")]) == 2
    assert "no such file or folder" in capsys.readouterr().err
    assert main(["export", str(checkpoint), str(tmp_path / "b"), "--family", "gpt2"]) == 2
    err = capsys.readouterr().err
    assert "the gpt2 format cannot say this configuration" in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "b").exists()
