"""``isoform evaluate`` on the command line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from isoform import cli
from isoform.checkpoints import Bundle
from isoform.config import ModelConfig, presets
from isoform.config.protocol import Protocol
from isoform.data.tokenizer import Tokenizer
from isoform.data.tokenizer_config import Characters
from isoform.evaluation import bleu, exact_match
from isoform.generation import Beam
from isoform.generation.texts import generate_texts
from isoform.nn import build

PAIRS = [(">>x<< abc", "cab"), (">>y<< h a", "a"), (">>x<< dada", "h"), ("d", "e")]
SHORT = ["--max-new-tokens", "5"]


@pytest.fixture(scope="module")
def translator() -> Bundle:
    tokenizer = Tokenizer.train(Characters(), ["abcdefgh xy<>"], where="letters")
    special = tokenizer.special
    config = presets.pre_ln(
        tokenizer.vocab_size, d_model=16, n_heads=2, ffn_width=24, n_encoder_layers=1, n_decoder_layers=1
    )
    protocol = Protocol(
        pad_id=special.pad, eos_ids=(special.eos,), start=(special.bos,), source_suffix=(special.eos,)
    )
    return Bundle(build(config, seed=5).eval(), config, tokenizer, tokenizer, protocol)


@pytest.fixture(scope="module")
def artifact(translator: Bundle, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(translator.save(tmp_path_factory.mktemp("evaluate") / "artifact"))


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "test.tsv"
    path.write_text("".join(f"{a}\t{b}\n" for a, b in PAIRS))
    return str(path)


def test_figures_as_json_and_as_a_table(translator, artifact, data, tmp_path: Path, capsys):
    given = ["evaluate", artifact, "--data", data, *SHORT, "--beam", "2", "--by", ">>(.)<<"]
    written = tmp_path / "outputs.jsonl"
    assert cli.main([*given, "--outputs", str(written), "--bootstrap", "20", "--json"]) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    outputs = generate_texts(translator, [a for a, _ in PAIRS], search=Beam(2), max_new_tokens=5)
    assert err == "" and answer["items"] == 4
    assert list(answer["scores"]) == ["nll", "exact_match", "chrf", "bleu"]
    assert answer["scores"]["bleu"]["value"] == pytest.approx(
        bleu(outputs, [b for _, b in PAIRS]).score().value
    )
    assert set(answer["scores"]["bleu"]) == {
        "name", "value", "signature", "count", "better", "interval", "parts"
    }  # fmt: skip
    assert "tok:13a" in answer["scores"]["bleu"]["signature"]
    assert "bs:20|seed:12345" in answer["scores"]["chrf"]["signature"]
    assert {g: s["count"] for g, s in answer["groups"]["exact_match"].items()} == {
        "x": 2,
        "y": 1,
        "(none)": 1,
    }
    rows = [json.loads(line) for line in written.read_text().splitlines()]
    assert rows[1] == {"input": ">>y<< h a", "output": outputs[1], "references": ["a"]}
    assert cli.main([*given, "--metrics", "exact_match,nll"]) == 0
    out = capsys.readouterr().out
    value = exact_match(outputs, [b for _, b in PAIRS]).score().value
    for shown in (
        f"{value:.4f}",
        "norm:none",
        "perplexity",
        "bits_per_byte",
        "exact_match by group",
        "(none)",
    ):
        assert shown in out
    assert "bleu" not in out


def test_two_networks(translator, artifact, data, tmp_path: Path, capsys):
    other = dataclasses.replace(translator, model=build(translator.config, seed=6).eval())
    other.save(tmp_path / "other")
    written = tmp_path / "outputs.jsonl"
    given = ["evaluate", artifact, str(tmp_path / "other"), "--data", data, *SHORT, "--metrics", "nll,chrf"]
    assert cli.main([*given, "--outputs", str(written), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["targets"] == [artifact, str(tmp_path / "other")] and answer["items"] == 4
    test = answer["scores"]["nll"]
    assert set(test) == {"first", "second", "difference", "interval", "p_value"}
    assert test["difference"] == pytest.approx(test["second"]["value"] - test["first"]["value"])
    assert "bs:1000|seed:12345" in test["first"]["signature"] and answer["not_tested"] == {}
    rows = [json.loads(line) for line in written.read_text().splitlines()]
    texts = [generate_texts(b, [a for a, _ in PAIRS], max_new_tokens=5) for b in (translator, other)]
    assert [[row["output"], row["other_output"]] for row in rows] == [
        list(t) for t in zip(*texts, strict=True)
    ]
    assert cli.main(given) == 0
    out = capsys.readouterr().out
    assert f"{test['difference']:+.4f}" in out and f"{test['p_value']:.3f}" in out
    assert cli.main([*given, "--bootstrap", "0"]) == 2
    assert cli.main(["evaluate", artifact, artifact, artifact, "--data", data]) == 2
    assert "3 networks given" in capsys.readouterr().err


def test_the_test_part_of_a_run(artifact, data, tmp_path: Path, capsys):
    run = tmp_path / "run.toml"
    run.write_text(
        """
[model]
preset = "pre_ln"
d_model = 16
[data]
kind = "parallel"
train = "train.tsv"
test = "test.tsv"
format = {kind = "tsv", source = 1, target = 2}
[tokenizer.shared]
kind = "characters"
[training]
seed = 0
steps = 1
batches = {kind = "tokens", max_tokens = 64}
schedule = {kind = "constant", lr = 1e-3}
"""
    )
    given = ["evaluate", artifact, *SHORT, "--json", "--metrics", "exact_match,nll"]
    assert cli.main([*given, "--data", data]) == 0
    expected = json.loads(capsys.readouterr().out)
    status = cli.main([*given, "--data", str(run)])
    out, err = capsys.readouterr()
    assert status == 0, err
    assert json.loads(out) == expected
    assert cli.main([*given, "--data", str(run), "--part", "validation"]) == 2
    assert "name no validation part" in capsys.readouterr().err


def test_data_of_another_kind_than_the_network_reads(artifact, tmp_path: Path, capsys):
    run, decoder = tmp_path / "run.toml", presets.gpt2(12, d_model=16, n_heads=2, ffn_width=24, n_layers=1)
    text = {"kind": "text", "documents": "lines", "train": "train.tsv", "test": "train.tsv"}
    pairs = {**text, "kind": "parallel", "format": {"kind": "tsv", "source": 1, "target": 2}}
    del pairs["documents"]
    (tmp_path / "train.tsv").write_text("a\tb\n")
    for data, name, message in (
        (text, artifact, "kind 'text'; this network reads two streams"),
        (pairs, str(_saved(decoder, tmp_path)), "kind 'parallel'; this network reads one stream"),
    ):
        given = {
            "model": {"preset": "gpt2"},
            "data": data,
            "tokenizer": {"shared": {"kind": "characters"}},
            "training": {
                "seed": 0,
                "steps": 1,
                "batches": {"kind": "tokens", "max_tokens": 64},
                "schedule": {"kind": "constant", "lr": 1e-3},
            },
        }
        run.with_suffix(".json").write_text(json.dumps(given))
        assert cli.main(["evaluate", name, "--data", str(run.with_suffix(".json"))]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and message in err


def test_a_window_beyond_the_learned_positions(tmp_path: Path, capsys):
    config = presets.gpt2(12, d_model=16, n_heads=2, ffn_width=24, n_layers=1, max_positions=8)
    artifact = str(_saved(config, tmp_path))
    (tmp_path / "text.txt").write_text("abc def " * 4)
    given = ["evaluate", artifact, "--data", str(tmp_path / "text.txt"), "--documents", "stream"]
    assert cli.main([*given, "--window", "9"]) == 2
    assert "a window of 9 tokens, the network has 8 positions" in capsys.readouterr().err
    assert cli.main([*given, "--window", "8"]) == 0


def _saved(config: ModelConfig, folder: Path) -> Path:
    tokenizer = Tokenizer.train(Characters(), ["abcdef \t"], where="letters")
    special = tokenizer.special
    config = config.replace(embedding__vocab_size=tokenizer.vocab_size)
    protocol = Protocol(pad_id=special.pad, eos_ids=(special.eos,), start=(special.bos,))
    model = build(config, seed=5).eval()
    return Bundle(model, config, tokenizer, None, protocol).save(folder / "decoder")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--metrics", "bleau"], "did you mean 'bleu'"),
        (["--by", "x"], "has no group"),
        (["--by", "("], "not a regular expression"),
        (["--length-penalty", "gnmt"], "--length-penalty ranks beams"),
        (["--alpha", "2"], "--alpha is of a beam"),
        (["--beam", "2", "--alpha", "2"], "--alpha is an exponent of the penalty"),
        (["--seed", "2"], "--seed is of resamples"),
        (["--bootstrap", "3", "--seed", "-5"], "'--seed': Input should be greater than or equal to 0"),
        (["--fields", "1,2,3"], "two fields are needed, 3 given"),
        (["--fields", "1,4"], "column 4 is asked for"),
    ],
)
def test_bad_input_is_one_line(artifact, data, arguments, message, capsys):
    assert cli.main(["evaluate", artifact, "--data", data, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err


def test_missing_data(artifact, capsys):
    assert cli.main(["evaluate", artifact, "--data", "nowhere.tsv"]) == 2
    assert "nowhere.tsv: no such file" in capsys.readouterr().err
