"""``isoform cost``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from isoform import cli
from isoform.cli.cost import largest_batch, size
from isoform.config import presets, write
from isoform.cost.flops import flops
from isoform.cost.memory import memory
from isoform.cost.workload import Workload
from isoform.errors import ConfigError
from isoform.nn import build

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


def test_text(translator: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["cost", translator, "--mode", "decode", "--length", "9"]) == 0
    out = capsys.readouterr().out
    assert "decode, B = 1, T = 9, S = 9" in out  # the source is as long as the target if not said
    for shown in ("Parameters", "FLOPs of a step", "Memory of a device", "kv cache", "peak", "4d² + 2df"):
        assert shown in out
    assert "that of embedding.table" in out and "adamw" not in out


def test_a_step_that_does_not_fit(translator: str, capsys: pytest.CaptureFixture[str]):
    work = Workload("train", 8, 16, source_length=16)
    peaks = {
        batch: memory(TRANSLATOR, Workload("train", batch, 16, source_length=16)).peak for batch in (5, 8)
    }
    arguments = ["cost", translator, "--batch", "8", "--length", "16"]
    assert cli.main([*arguments, "--memory", f"{peaks[8]}B"]) == 0
    assert "It fits into" in capsys.readouterr().out
    assert cli.main([*arguments, "--memory", str(peaks[8] - 1)]) == 1
    assert "does not fit" in capsys.readouterr().out
    assert cli.main([*arguments, "--memory", str(peaks[5]), "--json"]) == 1
    fit = json.loads(capsys.readouterr().out)["fit"]
    assert fit == {
        "limit": peaks[5],
        "fits": False,
        "largest_batch": largest_batch(TRANSLATOR, work, peaks[5]),
    }
    assert cli.main([*arguments, "--memory", "1kB"]) == 1
    assert "not even with one row" in capsys.readouterr().out


def test_largest_batch_is_the_last_that_fits():
    for devices, shard in ((1, "none"), (4, "fsdp")):
        work = Workload("train", devices, 16, source_length=16, devices=devices, shard=shard)
        limit = 2_000_000
        best = largest_batch(TRANSLATOR, work, limit)

        def peak(batch: int, devices: int = devices, shard: str = shard) -> int:
            return memory(
                TRANSLATOR, Workload("train", batch, 16, source_length=16, devices=devices, shard=shard)
            ).peak

        assert best % devices == 0 and peak(best) <= limit < peak(best + devices)
    assert largest_batch(TRANSLATOR, work, 10) == 0


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
    ],
)
def test_bad_requests_are_one_line(
    translator: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(["cost", translator, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err
