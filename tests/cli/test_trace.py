"""``isoform trace`` on the command line."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from isoform import cli


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
        (["--worked-example", "--visibility", "prefix", "--prefix", "3"], "prefix 3"),
        (["--worked-example", "--norm", "batch"], "'batch' is not one of 'layer', 'rms'"),
        ([], "expected"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["trace", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err
