"""``isoform cost``."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from isoform import cli
from isoform.cli.cost import size
from isoform.config import presets, write
from isoform.cost import Machine, Workload, fit, flops, memory, roofline
from isoform.errors import ConfigError
from isoform.nn import build
from isoform.report.cost import duration

SMALL = {"vocab_size": 30, "d_model": 16, "n_heads": 4, "ffn_width": 24}
TRANSLATOR = presets.pre_ln(**SMALL, n_encoder_layers=2, n_decoder_layers=3)


@pytest.fixture
def translator(tmp_path: Path) -> str:
    write(TRANSLATOR, tmp_path / "translator.toml")
    return str(tmp_path / "translator.toml")


def test_json_is_the_closed_form(translator: str, capsys: pytest.CaptureFixture[str]):
    arguments = ["--batch", "3", "--length", "7", "--source-length", "5", "--dtype", "bfloat16_autocast"]
    assert cli.main(["cost", translator, *arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert err == "" and answer["fit"] is None
    work = Workload("train", 3, 7, source_length=5, dtype="bfloat16_autocast")
    assert answer["work"]["source_length"] == 5
    assert answer["flops"]["hardware"] == flops(TRANSLATOR, work).hardware
    assert answer["memory"]["peak"] == memory(TRANSLATOR, work).peak
    with torch.device("meta"):
        model = build(TRANSLATOR)
    assert answer["parameters"]["total"] == sum(p.numel() for p in model.parameters())


def test_lengths_stay_within_the_learned_positions(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    short = presets.gpt2(**SMALL, n_layers=1, max_positions=40)
    both = presets.bart(**SMALL, max_positions=50)
    for config, length, source in ((short, 40, None), (both, 50, 50), (TRANSLATOR, 512, 512)):
        write(config, tmp_path / "config.toml")
        assert cli.main(["cost", str(tmp_path / "config.toml"), "--json"]) == 0
        work = json.loads(capsys.readouterr().out)["work"]
        assert (work["length"], work["source_length"]) == (length, source)
    assert cli.main(["cost", str(tmp_path / "config.toml"), "--length", "7", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["work"]["source_length"] == 7


def test_text(translator: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["cost", translator, "--mode", "decode", "--length", "9"]) == 0
    out = capsys.readouterr().out
    assert "decode, B = 1, T = 9, S = 9" in out  # the source is as long as the target if not said
    for shown in ("Parameters", "FLOPs of a step", "Memory of a device", "kv cache", "peak", "4d² + 2df"):
        assert shown in out
    assert "that of embedding.table" in out and "adamw" not in out


def test_a_step_that_does_not_fit(translator: str, capsys: pytest.CaptureFixture[str]):
    work = Workload("train", 8, 16, source_length=16)
    peak = memory(TRANSLATOR, work).peak
    arguments = ["cost", translator, "--batch", "8", "--length", "16"]
    assert cli.main([*arguments, "--memory", f"{peak}B"]) == 0
    assert "It fits into" in capsys.readouterr().out
    assert cli.main([*arguments, "--memory", str(peak - 1)]) == 1
    out = capsys.readouterr().out
    assert "It does not fit" in out and "At length 16 batch 7 fits" in out
    assert cli.main([*arguments, "--memory", str(peak // 2), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)["fit"]
    assert answer == dataclasses.asdict(fit(TRANSLATOR, work, peak // 2)) and answer["fits"] is False
    assert cli.main([*arguments, "--memory", "1kB"]) == 1
    assert "Neither a single row" in capsys.readouterr().out


def test_the_time_is_that_of_this_machine(
    translator: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    machine = Machine("cpu", "float32", 1e12, 5e10)
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr("isoform.cost.measure_machine", lambda *what: asked.append(what) or machine)
    assert cli.main(["cost", translator, "--time", "--json"]) == 0
    out, err = capsys.readouterr()
    work = Workload("train", 1, 512, source_length=512)
    assert json.loads(out)["roofline"]["seconds"] == roofline(TRANSLATOR, work, machine).seconds
    assert asked == [("float32", "cpu")] and "measuring" in err
    assert cli.main(["cost", translator, "--time"]) == 0
    out = capsys.readouterr().out
    assert "1.00 TFLOP/s in float32, 50.00 GB/s" in out and "tokens a second" in out


@pytest.mark.parametrize(("seconds", "text"), [(12.34, "12.3 s"), (0.0123, "12.3 ms"), (4.5e-6, "4.5 µs")])
def test_durations(seconds: float, text: str):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("24GiB", 24 * 1024**3),
        ("80 gb", 80 * 1000**3),
        ("1.5MiB", 1572864),
        ("512", 512),
        ("2kB", 2000),
        ("7B", 7),
    ],
)
def test_sizes(text: str, count: int):
    assert size(text) == count


@pytest.mark.parametrize("text", ["24XB", "GiB", "-3GiB", "1,5GiB", ""])
def test_sizes_that_are_none(text: str):
    with pytest.raises(ConfigError, match="expected a number and a unit"):
        size(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "4"], "choose 'ddp' or 'fsdp'"),
        (["--dtype", "int8"], "'int8' is not one of"),
        (["--batch", "0"], "batch"),
        (["--prefix-length", "3"], "prefix"),
        (["--memory", "24"], "that is 24 bytes; expected a unit too, e.g. 24GiB"),
    ],
)
def test_bad_requests_are_one_line(
    translator: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(["cost", translator, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err


@pytest.mark.parametrize("target", ["translator.toml", "large.py:made"])
def test_closed_forms_come_without_pytorch(translator: str, tmp_path: Path, target: str):
    """A network of any size in under two seconds: importing PyTorch alone may take longer."""
    made = "from isoform import presets\n"
    made += f"made = lambda: presets.pre_ln(**{SMALL}, n_encoder_layers=2, n_decoder_layers=3)\n"
    (tmp_path / "large.py").write_text(made)
    code = "import sys; from isoform.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "cost", target, "--memory", "1GiB", "--shard", "fsdp"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert "fits" in found.stdout
