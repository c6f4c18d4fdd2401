"""``isoform show``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from isoform import cli
from isoform.config import Frozen, parse, presets, write
from isoform.config.model import ModelConfig
from isoform.nn import build

SMALL = {"vocab_size": 30, "d_model": 16, "n_heads": 4, "ffn_width": 24}


@pytest.fixture
def translator(tmp_path: Path) -> Path:
    return saved(
        tmp_path / "translator.toml", presets.pre_ln(**SMALL, n_encoder_layers=2, n_decoder_layers=3)
    )


def saved(path: Path, config: Frozen) -> Path:
    write(config, path)
    return path


def test_everything_is_shown(translator: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["show", str(translator), "--batch", "3", "--length", "7", "--source-length", "5"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for title in ("Who may read whom", "Shapes", "Parameters", "Shared tensors"):
        assert title in out
    assert "Pre-LN encoder–decoder, 2 + 3 layers of width 16" in out
    assert "modules agree" in out and "head.weight" in out
    assert "[3, 7, 16]" in out and "[3, 5, 16]" in out


def test_json_is_complete_and_reads_back(translator: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["show", str(translator), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    config = parse(ModelConfig, answer["config"])
    assert config == presets.pre_ln(**SMALL, n_encoder_layers=2, n_decoder_layers=3)
    with torch.device("meta"):
        model = build(config)
    count = sum(p.numel() for p in model.parameters())
    assert answer["parameters"]["total"] == answer["parameters"]["counted"] == count
    assert answer["agree"] is True
    assert any({"embedding.weight", "head.weight"} <= set(group) for group in answer["shared"])
    assert [(g["stack"], g["reads"]) for g in answer["visibility"]] == [
        ("encoder", "itself"), ("decoder", "itself"), ("decoder", "source"),
    ]  # fmt: skip
    assert answer["visibility"][1]["allowed"][0] == [True] + [False] * 5
    assert answer["words"][0].startswith("Pre-LN")
    head = answer["shapes"][-1]
    assert head == {
        "operation": "head", "input": "[2, 16, 16]", "parameters": "[30, 16]", "output": "[2, 16, 30]",
    }  # fmt: skip


def test_against_says_what_differs(translator: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    changed = presets.pre_ln(**SMALL, n_encoder_layers=2, n_decoder_layers=3).replace(
        decoder__layer__norm__eps=1e-6
    )
    other = saved(tmp_path / "other.json", changed)
    assert cli.main(["show", str(translator), "--against", str(other), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["differs"] is True
    (field,) = answer["fields"]
    assert (field["path"], field["a"], field["b"]) == ("decoder.layer.norm.eps", 1e-5, 1e-6)
    assert len(answer["statements"]) == 1 and "1e-5" in answer["statements"][0].replace("1e-05", "1e-5")
    assert cli.main(["show", str(translator), "--against", str(other)]) == 0
    assert answer["statements"][0][:40] in capsys.readouterr().out
    assert cli.main(["show", str(translator), "--against", str(translator)]) == 0
    assert "nothing" in capsys.readouterr().out


def test_windows_and_prefixes_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = presets.gpt2(**SMALL, n_layers=2).replace(
        decoder__visibility="prefix", decoder__layer__attention__window=3
    )
    assert cli.main(["show", str(saved(tmp_path / "m.yaml", config))]) == 0
    out = capsys.readouterr().out
    assert "prefix, condition of 2, window 3" in out and "layers 0–1" in out


def test_a_run_file_shows_its_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "run.toml"
    run.write_text("[model]\npreset = 'gpt3'\n")
    assert cli.main(["show", str(run)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "did you mean 'gpt2'" in err


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "d_model = [", "not valid TOML"),
        ("a.toml", "d_modle = 3", "d_model"),
        ("a.json", "{}", "d_model"),
        ("a.py", "x = 1", "a.py:factory"),
    ],
)
def test_bad_files_are_one_line(
    tmp_path: Path, name: str, text: str, message: str, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / name).write_text(text)
    assert cli.main(["show", str(tmp_path / name)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err
