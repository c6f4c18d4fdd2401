"""``isoform trace`` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from isoform import cli
from isoform.checkpoints import Bundle
from isoform.config import presets
from isoform.config.protocol import Protocol
from isoform.data import Tokenizer
from isoform.data.tokenizer_config import Characters
from isoform.nn import build
from isoform.tokens import Tokens


def test_worked_example_in_text(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["trace", "--worked-example"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for number in range(37, 51):
        assert f"(6.{number})" in out
    for shown in ("0.944193", "0.035119", "0.759429", "4.888386", "■ ·", "the loss is the same"):
        assert shown in out


def test_worked_example_as_json():
    arguments = [
        "--worked-example",
        "--json",
        "--visibility",
        "prefix",
        "--prefix",
        "2",
        "--placement",
        "post",
    ]
    done = CliRunner().invoke(cli.application("trace"), [*arguments, "--norm", "rms", "--eps", "1e-3"])
    assert done.exit_code == 0 and done.stderr == ""
    answer = json.loads(done.stdout)
    assert answer["settings"] == {
        "visibility": "prefix", "prefix": 2, "placement": "post", "norm": "rms", "eps": 1e-3,
    }  # fmt: skip
    assert answer["allowed"] == [[True, True], [True, True]]
    assert [set(step) >= {"name", "equation", "value"} for step in answer["steps"]]
    steps = {step["name"]: step["value"] for step in answer["steps"]}
    assert steps["input"] == [[1.0, 3.0], [4.0, 2.0]]
    assert isinstance(steps["loss_targets_B_A"], float)
    assert answer["contrast"]["against"] == "causal"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--worked-example", "--eps", "-1"], "eps -1: expected a finite number"),
        (["--worked-example", "--prefix", "2"], "--prefix needs --visibility prefix"),
        (["--worked-example", "--attention", "0:0"], "--attention is for a text through a network"),
        (["target", "text", "--eps", "1e-5"], "--eps is a setting of --worked-example"),
        (["--worked-example", "--visibility", "prefix", "--prefix", "3"], "prefix 3"),
        (["--worked-example", "--norm", "batch"], "'--norm': 'batch' is not one of 'layer', 'rms'"),
        ([], "expected"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["trace", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err


FACTORIES = """
from isoform.config import presets
SMALL = dict(vocab_size=30, d_model=16, n_heads=4, ffn_width=24)
def translator():
    return presets.pre_ln(**SMALL, n_encoder_layers=1, n_decoder_layers=2)
def decoder():
    return presets.gpt2(**SMALL, n_layers=9)
def prefix():
    return presets.gpt2(**SMALL, n_layers=1).replace(decoder__visibility="prefix")
"""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    path = tmp_path / "trace_factories.py"
    path.write_text(FACTORIES)
    return path


def test_ids_through_an_encoder_decoder(models: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["trace", f"{models}:translator", "3 4 5", "--ids", "--target", "1 2", "--attention", "1:2"]
    assert cli.main([*arguments, "--json", "--top", "4"]) == 0
    out, err = capsys.readouterr()
    assert "drawn with seed 0" in err
    answer = json.loads(out)
    assert [t["id"] for t in answer["source"]] == [3, 4, 5]
    assert [t["token"] for t in answer["tokens"]] == ["1", "2"]
    assert [len(answer["guesses"]), len(answer["guesses"][0]), len(answer["guesses"][0][0])] == [2, 2, 4]
    one = answer["attention"]
    assert (one["side"], one["layer"], one["head"]) == ("cross", 1, 2)
    assert one["label"] == "a reading pattern, not an explanation"
    assert [sum(row) for row in one["weights"]] == pytest.approx([1, 1]) and len(one["weights"][0]) == 3
    config = presets.pre_ln(
        vocab_size=30, d_model=16, n_heads=4, ffn_width=24, n_encoder_layers=1, n_decoder_layers=2
    )
    with torch.no_grad():
        logits = (
            build(config, seed=0)
            .eval()(Tokens(torch.tensor([[1, 2]])), Tokens(torch.tensor([[3, 4, 5]])))
            .logits
        )
    best = logits[0].double().softmax(-1).topk(4)
    last = answer["guesses"][-1]
    assert [[g["id"] for g in place] for place in last] == best.indices.tolist()
    assert [g["probability"] for g in last[1]] == pytest.approx(best.values[1].tolist(), rel=1e-5)
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    for shown in ("source  3 4 5", "cross-attention", "1 × 2 × 16", "a reading pattern, not an explanation"):
        assert shown in out
    assert cli.main([*arguments[:-1], "encoder:0:3"]) == 0
    assert "encoder layer 0, head 3" in capsys.readouterr().out


def test_a_picture_of_the_attention(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    picture = tmp_path / "map.png"
    arguments = [
        "trace",
        f"{models}:decoder",
        "3 4 5",
        "--ids",
        "--attention",
        "8:0",
        "--output",
        str(picture),
    ]
    assert cli.main(arguments) == 0
    out, err = capsys.readouterr()
    assert picture.read_bytes().startswith(b"\x89PNG") and f"wrote {picture}" in err
    assert "layer 0" in out and "layer 6" in out and "layer 7" not in out  # not all nine side by side


def test_a_prefix_decoder_reads_its_condition_both_ways(models: Path, capsys: pytest.CaptureFixture[str]):
    arguments = [
        "trace",
        f"{models}:prefix",
        "3 4 5",
        "--ids",
        "--target",
        "7",
        "--attention",
        "0:0",
        "--json",
    ]
    assert cli.main(arguments) == 0
    weights = json.loads(capsys.readouterr().out)["attention"]["weights"]
    assert [[w > 0 for w in row] for row in weights] == [[True] * 3 + [False]] * 3 + [[True] * 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decoder", "3 x"], "expected token ids below 30"),
        (["decoder", "3 30"], "expected token ids below 30"),
        (["decoder", " "], "expected token ids below 30"),
        (["translator", "3 4"], "an encoder–decoder needs --target"),
        (["decoder", "3", "--attention", "1"], "expected LAYER:HEAD"),
        (["decoder", "3", "--attention", "middle:1:1"], "expected LAYER:HEAD"),
        (["decoder", "3", "--attention", "9:0"], "self-attention in layers 0 to 8"),
        (["decoder", "3", "--output", "a.png"], "--output needs --attention"),
        (["decoder", "3", "--attention", "0:0", "--output", "a.gif"], "expected .png, .svg, .pdf"),
        (["decoder", "3", "--worked-example"], "--worked-example has its own network"),
    ],
)
def test_bad_requests_are_one_line(
    models: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(["trace", f"{models}:{arguments[0]}", *arguments[1:], "--ids"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err.splitlines()[-1]


def test_a_text_needs_a_tokenizer(models: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["trace", f"{models}:decoder", "some text"]) == 2
    assert "no tokenizer comes with it; give token ids with --ids" in capsys.readouterr().err


def test_a_text_through_an_artifact(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tokenizer = Tokenizer.train(Characters(), ["abc xyz"], where="test")
    size = tokenizer.vocab_size
    config = presets.pre_ln(
        vocab_size=size, d_model=8, n_heads=2, ffn_width=12, n_encoder_layers=1, n_decoder_layers=1
    )
    special = tokenizer.special
    protocol = Protocol(
        pad_id=special.pad, eos_ids=(special.eos,), start=(special.bos,), source_suffix=(special.eos,)
    )
    folder = Bundle(build(config, seed=3), config, tokenizer, tokenizer, protocol).save(tmp_path / "artifact")
    assert cli.main(["trace", str(folder), "xab", "--target", "cz", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [t["token"] for t in answer["source"]] == ["x", "a", "b", "</s>"]
    assert [t["token"] for t in answer["tokens"]] == ["<s>", "c", "z"]
    assert cli.main(["trace", str(folder), "xab", "--json"]) == 0
    own = json.loads(capsys.readouterr().out)
    # Greedy output: what it says at each place is what it read at the next one.
    ids = [t["id"] for t in own["tokens"]]
    assert [place[0]["id"] for place in own["guesses"][-1]][: len(ids) - 1] == ids[1:]
