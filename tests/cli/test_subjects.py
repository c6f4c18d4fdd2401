"""Two models of different faces get the same content; what users' functions do wrong is one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from isoform import cli
from isoform.cli import subjects
from isoform.errors import ConfigError
from isoform.tokens import Tokens

MODELS = """
import torch
import isoform as iso
from torch import nn

def ours():
    config = iso.presets.llama(vocab_size=11, d_model=8, n_heads=2, ffn_width=12, n_layers=1)
    return iso.build(config, seed=0)

def translator():
    config = iso.presets.bart(vocab_size=11, d_model=8, n_heads=2, ffn_width=12, n_layers=1)
    return iso.build(config, seed=0)

class Foreign(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = ours()

    def forward(self, input_ids, attention_mask=None):
        return self.inner(iso.Tokens(input_ids, attention_mask.bool())).logits

class Anything(Foreign):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)

class ForeignTranslator(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = translator()

    def forward(self, input_ids, attention_mask=None, decoder_input_ids=None, decoder_attention_mask=None):
        target = iso.Tokens(decoder_input_ids)
        if decoder_attention_mask is not None:
            target = iso.Tokens(decoder_input_ids, decoder_attention_mask.bool())
        return self.inner(target, source=iso.Tokens(input_ids, attention_mask.bool())).logits

class Other(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)

def too_wide():
    return (torch.ones(1, 3),)

def with_argument(n):
    return Foreign()
"""


@pytest.fixture
def models(tmp_path: Path) -> str:
    path = tmp_path / "models_of_two_faces.py"
    path.write_text(MODELS)
    return str(path)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("Foreign", "ours"),
        ("ours", "Foreign"),
        ("Foreign", "Anything"),
        ("ForeignTranslator", "translator"),
        ("translator", "ForeignTranslator"),
    ],
)
def test_two_faces_read_the_same(models: str, first: str, second: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["compare", f"{models}:{first}", f"{models}:{second}"]) == 0
    assert "equivalent" in capsys.readouterr().out


def test_padding_is_carried_over(models: str):
    _, _, theirs, ours = subjects.pair(f"{models}:Foreign", f"{models}:ours", None, None)
    assert isinstance(ours["tokens"], Tokens)
    assert torch.equal(ours["tokens"].real.long(), theirs["attention_mask"])
    assert not ours["tokens"].real.all()


def test_a_wrapper_takes_what_the_first_takes(tmp_path: Path):
    path = tmp_path / "wrapped.py"
    path.write_text("""
import torch
class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(11, 4)
    def forward(self, ids):
        return self.table(ids)
class Wrapper(Plain):
    def forward(self, *inputs, **named):
        return super().forward(*inputs, **named)
""")
    _, _, ours, theirs = subjects.pair(f"{path}:Plain", f"{path}:Wrapper", None, None)
    assert theirs is ours and set(ours) == {"ids"}


def test_what_has_no_other_form_is_asked_for(models: str):
    with pytest.raises(ConfigError, match=r"does not take input_ids, attention_mask; .*--candidate-inputs"):
        subjects.pair(f"{models}:Foreign", f"{models}:Other", None, None)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["{}:Other", "--inputs", "{}:too_wide"], "forward of Other, with what .*:too_wide gave, failed"),
        (["{}:with_argument"], "missing a required argument: 'n'; expected a function that needs no"),
    ],
)
def test_faults_of_users_functions_are_one_line(
    models: str, arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(["audit", *(a.format(models) for a in arguments)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and re.search(line, said), said


def test_a_file_that_fails_while_it_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "fails_at_once.py"
    path.write_text("x = 1\nundefined\n")
    assert cli.main(["audit", f"{path}:make"]) == 2
    assert f"NameError: name 'undefined' is not defined ({path}:2)" in capsys.readouterr().err
