"""What a TARGET may be, and JSON on stdout."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from isoform.cli import common
from isoform.errors import ConfigError

FACTORIES = """
import neighbour
from torch import nn

def module():
    return nn.Linear(neighbour.WIDTH, 2)

def number():
    return 3

def broken():
    raise KeyError("a key")

def refuses():
    from isoform.errors import ConfigError
    raise ConfigError("n_heads: 3 does not fit")

value = 3
"""


@pytest.fixture
def factories(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("WIDTH = 5\n")
    path = tmp_path / "some_factories.py"
    path.write_text(FACTORIES)
    return path


def test_a_factory_in_a_file(factories: Path):
    target = common.resolve(f"{factories}:module")
    assert isinstance(target.model, torch.nn.Linear) and target.model.in_features == 5
    assert target.config is None and target.bundle is None
    with pytest.raises(ConfigError, match="a Linear, which has no Isoform configuration"):
        target.architecture()


def test_a_factory_in_a_module(factories: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(factories.parent)
    monkeypatch.syspath_prepend(factories.parent)
    assert isinstance(common.resolve("some_factories:module").model, torch.nn.Linear)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{}:modul", "has no 'modul'; did you mean 'module'?"),
        ("{}:value", "value is a int, expected a function"),
        ("{}:number", "returned int, expected a torch.nn.Module"),
        ("{}:broken", "failed with KeyError: 'a key' .*some_factories.py:"),
        ("{}:refuses", "^n_heads: 3 does not fit$"),
        ("no_such_file.py:build", "no_such_file.py: no such file"),
        ("no_such_package.models:build", "no module named 'no_such_package'"),
        ("no_such.toml", "no_such.toml: no such file"),
        ("no_such", "no such file or directory; expected an artifact"),
    ],
)
def test_targets_that_are_none(factories: Path, name: str, message: str):
    with pytest.raises(ConfigError, match=message):
        common.resolve(name.format(factories))


def test_a_file_that_does_not_load_is_one_error(tmp_path: Path):
    path = tmp_path / "torn.py"
    path.write_text("def build(:\n")
    with pytest.raises(ConfigError, match=r"torn\.py cannot be loaded: invalid syntax"):
        common.resolve(f"{path}:build")


def test_plain_is_valid_json(capsys: pytest.CaptureFixture[str]):
    @dataclasses.dataclass
    class Row:
        name: str
        values: torch.Tensor

    common.emit(
        {
            "row": Row("première", torch.tensor([[1.5, math.inf]], requires_grad=True)),
            "path": Path("a/b"),
            3: np.float32(0.5),
            "nan": [math.nan, True, None, (1, 2)],
        }
    )
    text = capsys.readouterr().out
    assert "première" in text
    assert json.loads(text) == {
        "row": {"name": "première", "values": [[1.5, None]]},
        "path": "a/b",
        "3": 0.5,
        "nan": [None, True, None, [1, 2]],
    }
