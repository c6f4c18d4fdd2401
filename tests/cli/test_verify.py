"""``isoform audit``, ``compare`` and ``diagnose``: what they print, how they end; bad input is one line."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from isoform import cli

MODELS = """
import torch
from isoform.config import presets
from isoform.nn import build
from isoform import Tokens

SIZES = dict(d_model=8, n_heads=2, ffn_width=12, n_layers=1, max_positions=16)


def one():
    return build(presets.gpt2(23, **SIZES), seed=1).double()


def other():
    model = one()
    model.head.weight.data *= 1.5
    return model


def given():
    return {"tokens": Tokens(torch.arange(1, 13).reshape(2, 6))}


def nothing():
    return 3


def fails():
    raise ValueError("no weights here")
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    place = tmp_path / "verified_models.py"
    place.write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    return place.name


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    try:
        status = cli.main(list(arguments))
    except SystemExit as ending:
        status = int(ending.code or 0)
    out = capsys.readouterr()
    return int(status or 0), out.out, out.err


def test_compare(models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = run(capsys, "compare", f"{models}:one", f"{models}:one", "--json")
    assert same[0] == 0
    table = json.loads(same[1])
    assert table["verdict"] == "equivalent" and table["first_divergence"] is None and table["rows"]
    page = tmp_path / "page.html"
    status, out, _ = run(capsys, "compare", f"{models}:one", f"{models}:other", "--html", str(page))
    assert status == 1 and "≠" in out and "differs" in out
    text = page.read_text()
    assert f"isoform compare {models}:one {models}:other" in text and "Divergence along depth" in text
    assert "http://" not in text.replace("http://www.w3.org", "") and "https://" not in text
    assert "src=" not in text.replace('src="data:', "")


def test_compare_with_files(models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from isoform.verify import record

    made = runpy.run_path(models)
    model, inputs = made["one"]().eval(), made["given"]()
    record(model, inputs, tmp_path / "kept.safetensors")
    with torch.no_grad():
        np.savez(tmp_path / "kept.npz", logits=model(**inputs).logits.numpy())
    options = ("--inputs", f"{models}:given")
    for kept in ("kept.safetensors", "kept.npz"):
        assert run(capsys, "compare", f"{models}:one", kept, *options)[0] == 0
        assert run(capsys, "compare", f"{models}:other", kept, *options)[0] == 1
    status, _, said = run(capsys, "diagnose", f"{models}:one", "kept.npz", *options)
    assert status == 2 and "can be compared, not diagnosed" in said and said.count("\n") == 1


def test_audit(models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    options = ("--check", "causality", "--check", "window", "--html", str(page), "--json")
    status, out, _ = run(capsys, "audit", f"{models}:one", *options)
    assert status == 0
    checks = {c["name"]: c["passed"] for c in json.loads(out)["checks"]}
    assert checks == {"causality": True, "window": None}
    assert "causality" in page.read_text()


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nowhere", "no such file or directory"),
        ("MODELS:two", "has no 'two'"),
        ("MODELS:nothing", "returned int"),
        ("MODELS:fails", "no weights here"),
        ("MODELS", "expected MODELS:factory"),
        ("no_such_module:x", "no module named"),
    ],
)
def test_bad_targets(target: str, said: str, models: str, capsys: pytest.CaptureFixture[str]) -> None:
    target, said = target.replace("MODELS", models), said.replace("MODELS", models)
    status, out, error = run(capsys, "audit", target)
    assert status == 2 and said in error and error.count("\n") == 1 and not out
