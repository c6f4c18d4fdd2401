"""``isoform import`` and ``isoform export``."""

from __future__ import annotations

import importlib.util
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


def stories_like(folder: Path) -> dict[str, Path]:
    """One small checkpoint of every kind that an import reads."""
    import struct

    import torch

    protocol = Protocol(pad_id=0, eos_ids=(2,), start=(1,))

    def bundle(cfg: object) -> Bundle:
        return Bundle(build(cfg, seed=0).eval(), cfg, None, None, protocol, {})  # type: ignore[arg-type]

    whole = presets.torch_nn(
        40, d_model=16, n_heads=4, ffn_width=12, n_encoder_layers=1, n_decoder_layers=1, norm_first=True
    )
    made = {"torch": export(bundle(whole), folder / "torch", to="torch")}
    if importlib.util.find_spec("ctranslate2") is not None:
        made["ctranslate2"] = export(bundle(whole), folder / "ct2", to="ctranslate2")
    sizes = (16, 12, 2, 4, 2, 40, 24)
    count = 40 * 16 + 2 * (16 * 2 + 16 * 16 * 2 + 8 * 16 * 2 + 3 * 12 * 16) + 16
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(count, generator=generator, dtype=torch.float64) - 0.5
    angles = torch.arange(24)[:, None] / 10_000.0 ** (torch.arange(0, 4, 2) / 4)
    flat = torch.cat([values, angles.cos().flatten(), angles.sin().flatten()]).float()
    path = folder / "model.bin"
    path.write_bytes(struct.pack("<7i", *sizes) + flat.numpy().tobytes())
    return {**made, "llama2.c": path}


def test_every_import_ends_in_both_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file's tensors come back bit for bit, and the artifact's probe agrees; both are kept."""
    for name, path in stories_like(tmp_path).items():
        assert main(["import", str(path), str(tmp_path / "artifact" / name), "--json"]) == 0, name
        answer = json.loads(capsys.readouterr().out)
        assert answer["tensors_bit_equal"] > 10, name
        assert answer["probe"]["tokens"] > 0, name
        kept = load(tmp_path / "artifact" / name, check=True).provenance["import_check"]
        assert kept == {"tensors_bit_equal": answer["tensors_bit_equal"]}


def test_an_import_that_loses_something_is_found(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from isoform.checkpoints import operations

    def rolled(self: object, tensors: list) -> list:  # type: ignore[type-arg]
        return [t.roll(1, 0) for t in kept(self, tensors)]

    kept = operations.Concatenate.save
    monkeypatch.setattr(operations.Concatenate, "save", rolled)
    assert main(["import", str(checkpoint), str(tmp_path / "a")]) != 0
    assert "does not come back as it was" in capsys.readouterr().err
