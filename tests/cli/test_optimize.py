"""``isoform optimize``: what is written, what is said, what is refused."""

from __future__ import annotations

import json

import pytest

from isoform.checkpoints import Bundle, load
from isoform.cli import main
from isoform.config.protocol import Protocol
from isoform.data.tokenizer import Tokenizer
from isoform.data.tokenizer_config import Characters
from isoform.generation.texts import generate_texts
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


def test_the_task_is_measured(tmp_path, capsys):
    """References that are what the plain network writes, but for one."""
    tokenizer = Tokenizer.train(Characters(), ["abcdefgh"], where="letters")
    special = tokenizer.special
    cfg = preset("original", vocab_size=tokenizer.vocab_size)
    protocol = Protocol(pad_id=special.pad, eos_ids=(special.eos,), start=(special.bos,))
    bundle = Bundle(network(cfg).float(), cfg, tokenizer, tokenizer, protocol)
    texts = ["abc", "fg", "hgf", "dada"]
    right = [text.replace("\n", " ") for text in generate_texts(bundle, texts)]
    assert all(right)
    right[2] = "something else"
    bundle.save(tmp_path / "a")
    for name, lines in (("texts", texts), ("right", right), ("few", right[:2])):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    given = ["optimize", str(tmp_path / "a"), str(tmp_path / "out"), "--max-new-tokens", "3"]
    given += ["--data", str(tmp_path / "texts"), "--references"]
    assert main([*given, str(tmp_path / "right"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["task"]
    assert (found["metric"], found["before"], found["count"]) == ("exact_match", 0.75, 4)
    assert 0 <= found["after"] <= 0.75 and 0 < found["p_value"] <= 1
    assert main([*given, str(tmp_path / "right"), "--metric", "token_error_rate"]) == 0
    assert "token_error_rate 0." in capsys.readouterr().out
    assert main([*given, str(tmp_path / "few")]) == 2
    assert "4 texts but 2 references" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--weights", "int4"], "int4"),
        (["--keep", "haed"], "no map is called 'haed'"),
        (["--data", "nowhere.txt"], "nowhere.txt"),
        (["--references", __file__], "no texts that they are of"),
        (["--metric", "chrf"], "--metric is of the task"),
    ],
)
def test_bad_input_is_one_line(artifact, tmp_path, capsys, given, said):
    assert main(["optimize", str(artifact), str(tmp_path / "out"), *given]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
