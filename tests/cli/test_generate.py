"""``isoform generate`` on the command line."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from isoform import cli
from isoform.checkpoints import Bundle
from isoform.config import presets
from isoform.config.protocol import Protocol
from isoform.data.tokenizer import Tokenizer
from isoform.data.tokenizer_config import Characters
from isoform.generation import Beam, Sample
from isoform.generation.texts import TextGenerator
from isoform.nn import build

TEXTS = ["abc", "", "h a d", "dada"]


@pytest.fixture(scope="module")
def translator() -> Bundle:
    tokenizer = Tokenizer.train(Characters(), ["abcdefgh \n\t"], where="letters")
    line, tab = tokenizer.encode("\n\t")
    special = tokenizer.special
    config = presets.pre_ln(
        tokenizer.vocab_size, d_model=16, n_heads=2, ffn_width=24, n_encoder_layers=1, n_decoder_layers=1
    )
    model = build(config, seed=5).eval()
    protocol = Protocol(
        pad_id=special.pad,
        eos_ids=(special.eos,),
        start=(special.bos,),
        source_suffix=(special.eos,),
        forced=((0, line), (2, tab)),
    )
    return Bundle(model, config, tokenizer, tokenizer, protocol)


@pytest.fixture(scope="module")
def artifact(translator: Bundle, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(translator.save(tmp_path_factory.mktemp("generate") / "artifact"))


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch):
    def given(text: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))

    return given


def escaped(text: str) -> str:
    return text.replace("\n", "\\n").replace("\t", "\\t")


def test_a_line_for_a_line(translator, artifact, tmp_path: Path, say, capsys):
    expected = [o[0].text for o in TextGenerator(translator, max_new_tokens=6).write(TEXTS)]
    assert any("\n" in text or "\t" in text for text in expected), "the escapes are not exercised"
    lines = "".join(f"{escaped(text)}\n" for text in expected)
    say("\n".join(TEXTS).encode() + b"\r\n")
    assert cli.main(["generate", artifact, "--max-new-tokens", "6"]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == (lines, "") and out.count("\n") == len(TEXTS)
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("\n".join(TEXTS[:3]) + "\n")
    two.write_text(TEXTS[3])
    assert cli.main(["generate", artifact, str(one), str(two), "--max-new-tokens", "6"]) == 0
    assert capsys.readouterr().out == lines
    assert cli.main(["generate", artifact, str(two), "--max-new-tokens", "6", "--raw"]) == 0
    assert capsys.readouterr().out == f"{expected[3]}\n"


def test_columns_and_objects(translator, artifact, tmp_path: Path, capsys):
    search = Beam(3, "length", alpha=0.5, n_best=2, early_stopping="never")
    expected = TextGenerator(translator, search=search, max_new_tokens=5, min_new_tokens=2).write(TEXTS)
    file = tmp_path / "in.txt"
    file.write_text("\n".join(TEXTS))
    beam = ["--beam", "3", "--length-penalty", "length", "--alpha", "0.5", "--early-stopping", "never"]
    arguments = ["generate", artifact, str(file), *beam, "--n-best", "2"]
    arguments += ["--max-new-tokens", "5", "--min-new-tokens", "2"]
    assert cli.main([*arguments, "--scores"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("\t") == [x for o in expected[0] for x in (f"{o.score:.4f}", escaped(o.text))]
    assert lines[1] == "0.0000\t"
    assert cli.main([*arguments, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["input"] for row in rows] == TEXTS
    first = rows[0]["outputs"][1]
    assert (first["text"], first["ids"]) == (expected[0][1].text, expected[0][1].ids)
    assert set(first) == {"text", "ids", "log_probability", "score", "finished"}


def test_drawn_texts(translator, artifact, tmp_path: Path, capsys):
    search = Sample(temperature=0.8, top_k=5, top_p=0.9, seed=3, n=2)
    expected = TextGenerator(translator, search=search, max_new_tokens=5).write(["abc"])[0]
    file = tmp_path / "in.txt"
    file.write_text("abc")
    arguments = ["--temperature", "0.8", "--top-k", "5", "--top-p", "0.9", "--seed", "3", "--n-best", "2"]
    assert cli.main(["generate", artifact, str(file), "--max-new-tokens", "5", *arguments]) == 0
    assert capsys.readouterr().out == "\t".join(escaped(o.text) for o in expected) + "\n"


def test_machine_code_is_a_choice(translator, artifact, tmp_path: Path, monkeypatch, capsys):
    from isoform.generation import Cached

    seen: list[str] = []
    begin = Cached.begin
    monkeypatch.setattr(
        Cached, "begin", lambda self, *given: (seen.append(self._compile), begin(self, *given))[1]
    )
    file = tmp_path / "in.txt"
    file.write_text("abc\n")
    for given in ([], ["--compile", "never"], ["--compile", "always"]):
        assert cli.main(["generate", artifact, str(file), "--max-new-tokens", "3", *given]) == 0
    assert seen == ["auto", "never", "always"]
    assert len(set(capsys.readouterr().out.splitlines())) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--beam", "2", "--temperature", "1"], "--beam searches, --temperature draws"),
        (["--n-best", "2"], "--n-best needs several outputs"),
        (["--length-penalty", "gnmt"], "--length-penalty ranks beams"),
        (["--alpha", "2"], "--alpha is of a beam"),
        (["--beam", "2", "--alpha", "2"], "--alpha is an exponent of the penalty"),
        (["--beam", "2", "--seed", "3"], "--seed is of draws"),
        (["--beam", "2", "--n-best", "3"], "n_best 3 must lie between 1 and width 2"),
        (["--top-p", "2"], "top_p 2.0"),
        (["--max-new-tokens", "5", "--min-new-tokens", "7"], "min_new_tokens is 7, expected at most"),
        (["nowhere.txt"], "nowhere.txt: no such file"),
    ],
)
def test_bad_input_is_one_line(artifact, arguments, message, capsys):
    assert cli.main(["generate", artifact, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err


def test_stdin_that_is_not_utf8(artifact, say, capsys):
    say(b"abc\n\xff\n")
    assert cli.main(["generate", artifact]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "stdin: not UTF-8" in err


def test_no_weights(tmp_path: Path, capsys):
    file = tmp_path / "made.py"
    file.write_text("from isoform.config import presets\ndef make():\n    return presets.gpt2(30)\n")
    assert cli.main(["generate", f"{file}:make"]) == 2
    assert "no weights to generate with" in capsys.readouterr().err
