"""``isoform optimize``: what is written, what is said, what is refused."""

from __future__ import annotations

import json

import pytest

from isoform.checkpoints import Bundle, load
from isoform.cli import main
from isoform.config.protocol import Protocol
from isoform.nn.forms import form_of
from networks import network, preset


@pytest.fixture
def artifact(tmp_path):
    cfg = preset("llama")
    Bundle(network(cfg).float(), cfg, None, None, Protocol(pad_id=0, eos_ids=())).save(tmp_path / "a")
    return tmp_path / "a"


def test_the_loss_of_quality_is_said(artifact, tmp_path, capsys):
    assert main(["optimize", str(artifact), str(tmp_path / "out"), "--max-new-tokens", "3"]) == 0
    said = capsys.readouterr().out
    assert (
        "greedy tokens agree at" in said
        and "NLL a token" in said
        and said.endswith(f"wrote {tmp_path / 'out'}\n")
    )
    assert form_of(load(tmp_path / "out", check=True).model) == "int8"


def test_json(artifact, tmp_path, capsys):
    given = ["--weights", "bfloat16", "--keep", "head", "--max-new-tokens", "3", "--json"]
    assert main(["optimize", str(artifact), str(tmp_path / "out"), *given]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["weights"] == "bfloat16" and found["keep"] == ["head"]
    assert 0 < found["quality"]["agreement"] <= 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--weights", "int4"], "int4"),
        (["--keep", "haed"], "no map is called 'haed'"),
        (["--data", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_bad_input_is_one_line(artifact, tmp_path, capsys, given, said):
    assert main(["optimize", str(artifact), str(tmp_path / "out"), *given]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
