"""Whole runs, from a run file to an artifact; the test part is read once, at the end (R35)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isoform import cli
from isoform.checkpoints import load
from isoform.config import ModelConfig
from isoform.config.base import parse
from isoform.config.files import read
from isoform.errors import ConfigError, DataError, IsoformError
from isoform.training import RunConfig, check, train
from isoform.training.log import read_log

WORDS = ["ab", "ba", "abc", "cab", "bca", "aab", "bcc"]
ENCODER = {
    "preset": "bert", "d_model": 12, "n_heads": 3, "ffn_width": 20, "n_layers": 1, "max_positions": 60,
    "n_token_types": 0, "dropout": 0.1,
}  # fmt: skip
DECODER = {"preset": "gpt2", **{k: v for k, v in ENCODER.items() if k not in ("preset", "n_token_types")}}
PAIR = {
    "preset": "pre_ln", "d_model": 12, "n_heads": 3, "ffn_width": 20, "n_encoder_layers": 1,
    "n_decoder_layers": 1, "dropout": 0.1,
}  # fmt: skip
SPLIT = {"validation": 0.2, "test": 0.2, "order": "random", "seed": 0}
TOKENS = {"kind": "tokens", "max_tokens": 200}


def sentences(count: int) -> list[str]:
    return [" ".join(WORDS[j % 7] for j in range(i % 5, i % 5 + 1 + i % 4)) + f" {i}" for i in range(count)]


def files(folder: Path) -> None:
    lines = sentences(60)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pairs.tsv").write_text("".join(f"{line}\t{line[::-1]}\n" for line in lines))
    (folder / "labels.tsv").write_text(
        "".join(f"{line}\t{'odd' if len(line) % 2 else 'even'}\n" for line in lines)
    )
    (folder / "text.txt").write_text("\n".join(lines) + "\n")
    conll = ["\n".join(f"{w} {'B-N' if w[0] == 'a' else 'O'}" for w in line.split()) for line in lines]
    (folder / "tags.conll").write_text("\n\n".join(conll) + "\n")


def run_of(kind: str, **training: Any) -> RunConfig:
    characters = {"shared": {"kind": "characters"}}
    pairs = {"format": {"kind": "tsv", "source": 1, "target": 2}, "train": "pairs.tsv", "split": SPLIT}
    head = {"pooling": "mean", "pooler": "none", "bias": True}
    columns, conll = {"kind": "tsv", "text": 1, "label": 2}, {"kind": "conll", "word": 1, "tag": 2}
    short = {"max_new_tokens": 8}
    table: dict[str, Any] = {
        "parallel": {"model": PAIR, "data": {"kind": "parallel", **pairs}, "evaluation": short},
        "prefix": {
            "model": {**DECODER, "visibility": "prefix"},
            "data": {"kind": "prefix", **pairs},
            "evaluation": {**short, "metrics": ["exact_match"]},
        },
        "stream": {
            "model": DECODER,
            "data": {
                "kind": "text", "documents": "stream", "train": "text.txt",
                "split": {"validation": 0.2, "test": 0.2, "order": "contiguous"},
            },
            "training": {"batches": {"kind": "windows", "length": 10, "batch_size": 4}},
        },
        "lines": {
            "model": DECODER,
            "data": {"kind": "text", "documents": "lines", "train": "text.txt", "split": SPLIT},
        },
        "packed": {
            "model": DECODER,
            "data": {"kind": "text", "documents": "lines", "train": "text.txt", "split": SPLIT},
            "training": {"batches": {"kind": "packed", "length": 40, "batch_size": 3}},
        },
        "masked": {
            "model": ENCODER,
            "data": {"kind": "text", "documents": "lines", "train": "text.txt", "split": SPLIT},
            "tokenizer": {"shared": {"kind": "characters", "specials": {"extra": ["<mask>"]}}},
            "training": {"masking": {}},
        },
        "labelled": {
            "model": {**ENCODER, "change": {"head": {"kind": "sequence_labels", **head}}},
            "data": {"kind": "labelled", "format": columns, "train": "labels.tsv", "split": SPLIT},
        },
        "tagged": {
            "model": {**ENCODER, "change": {"head": {"kind": "token_labels", "bias": True}}},
            "data": {"kind": "tagged", "format": conll, "train": "tags.conll", "split": SPLIT},
        },
    }[kind]  # fmt: skip
    settings = {
        "seed": 1, "steps": 4, "batches": TOKENS, "schedule": {"kind": "constant", "lr": 0.01},
        "checkpoint_every": 2, **table.get("training", {}), **training,
    }  # fmt: skip
    return parse(RunConfig, {"tokenizer": characters, **table, "training": settings})


METRICS = {
    "parallel": ["nll", "bleu", "chrf"],
    "prefix": ["exact_match"],
    "stream": ["nll"],
    "lines": ["nll"],
    "packed": ["nll"],
    "masked": ["nll"],
    "labelled": ["nll", "accuracy", "macro_f1"],
    "tagged": ["nll", "accuracy", "span_f1"],
}


@pytest.mark.parametrize("kind", list(METRICS))
def test_every_kind_of_data_ends_in_an_artifact(tmp_path: Path, kind: str) -> None:
    files(tmp_path)
    result = train(run_of(kind), tmp_path / "run", base=tmp_path, quiet=True)
    assert result.finished and result.fit.state.step == 4 and result.test is not None
    assert list(result.test) == METRICS[kind]
    assert all(metric["signature"] for metric in result.test.values())
    bundle = load(tmp_path / "run" / "artifact", check=True)
    assert bundle.provenance["test"] == result.test
    assert bundle.provenance["fit"]["validation_nll"] == result.fit.validation_nll
    if kind == "parallel":
        assert bundle.source_tokenizer is bundle.tokenizer
        assert isinstance(bundle.generate(["ab ba 3"], max_new_tokens=5)[0], str)
    if kind == "labelled":
        assert bundle.provenance["labels"] == ["even", "odd"]
    again = train(run_of(kind), tmp_path / "run", base=tmp_path, quiet=True)
    assert again.test == result.test and again.fit.trial is None


def test_what_a_run_leaves_behind(tmp_path: Path) -> None:
    files(tmp_path)
    run = run_of("parallel")
    folder = tmp_path / "run"
    train(run, folder, base=tmp_path, quiet=True)
    expanded = read(RunConfig, folder / "run.toml")
    assert isinstance(expanded.model, ModelConfig) and read(RunConfig, folder / "request.toml") == run
    assert expanded.training == run.training
    report = json.loads((folder / "preflight.json").read_text())
    assert report["steps"] == 4 and report["parameters"] > 1000 and report["trial"]["without_gradient"] == []
    assert len(read_log(folder / "log.csv")) == 2


def test_the_test_part_is_not_read_before_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is stopped has not scored the test."""
    from isoform.training import loop, scoring

    files(tmp_path)
    scored: list[int] = []
    monkeypatch.setattr(scoring, "score", lambda *a, **k: scored.append(1))
    monkeypatch.setattr(
        loop._Loop, "_end", lambda self, interrupt: "signal" if self.state.step == 1 else None
    )
    result = train(run_of("lines"), tmp_path / "run", base=tmp_path, quiet=True)
    assert not result.finished and result.test is None and not scored
    assert not (tmp_path / "run" / "artifact").exists()


def test_changed_data_are_refused(tmp_path: Path) -> None:
    files(tmp_path)
    train(run_of("lines"), tmp_path / "run", base=tmp_path, quiet=True)
    with (tmp_path / "text.txt").open("a") as file:
        file.write("abc\n")
    with pytest.raises(DataError, match=r"text\.txt: not the file this run was begun with"):
        train(run_of("lines"), tmp_path / "run", base=tmp_path, quiet=True)


def test_another_run_is_refused_in_words(tmp_path: Path) -> None:
    files(tmp_path)
    train(run_of("lines"), tmp_path / "run", base=tmp_path, quiet=True)
    with pytest.raises(ConfigError, match=r"seed.*1 in the first, 2 in the second"):
        train(run_of("lines", seed=2), tmp_path / "run", base=tmp_path, quiet=True)


def test_rows_beyond_the_positions_are_refused_before_training(tmp_path: Path) -> None:
    files(tmp_path)
    run = run_of("lines").replace(**{"model.arguments.max_positions": 7})
    with pytest.raises(DataError, match=r"train: rows of up to 19 tokens, the network has 7 positions"):
        check(run, base=tmp_path)


def test_packed_rows_may_be_longer_than_the_table_since_each_document_begins_anew(tmp_path: Path) -> None:
    files(tmp_path)
    run = run_of("packed").replace(**{"model.arguments.max_positions": 22})  # rows of 40, texts of up to 19
    result = train(run, tmp_path / "run", base=tmp_path, quiet=True)
    assert result.finished and result.test is not None
    run = run_of("packed").replace(**{"model.arguments.max_positions": 12})
    with pytest.raises(DataError, match=r"train: documents of up to 19 tokens, the network has 12 positions"):
        check(run, base=tmp_path)


def test_a_test_part_beyond_the_positions_is_refused_before_training(tmp_path: Path) -> None:
    files(tmp_path)
    (tmp_path / "test.txt").write_text("ab\n" + "abc " * 9 + "\n")
    run = run_of("lines")
    data = run.data.replace(split=None, test=Path("test.txt"))
    run = run.replace(data=data, **{"model.arguments.max_positions": 22})
    with pytest.raises(DataError, match=r"test: rows of up to 37 tokens, the network has 22 positions"):
        check(run, base=tmp_path)


def test_the_preflight_adds_up(tmp_path: Path) -> None:
    files(tmp_path)
    run = run_of("parallel", steps=None, epochs=3, accumulation=2)
    found = check(run, base=tmp_path)
    assert found.steps is not None and found.epochs == pytest.approx(found.steps / found.steps_per_epoch)
    assert 3 <= found.epochs < 3.5
    assert found.trial.supervised < found.trial.tokens <= 200
    assert found.trial.weight_bytes == 16 * found.parameters
    assert found.trial.activation_bytes > 4 * found.trial.tokens * 12
    assert 0 <= found.padding_share < 0.5
    assert json.dumps(found.to_dict())
    assert not [said for said in found.remarks if "warms up" in said]
    slow = {"kind": "linear", "lr": 0.01, "warmup": 400}
    (said,) = [s for s in check(run_of("parallel", schedule=slow), base=tmp_path).remarks if "warms up" in s]
    assert said.endswith("for 400 updates and the run ends after 4: the full rate is never reached")


# The command line


def write_run(folder: Path, kind: str) -> Path:
    from isoform.config.files import write

    files(folder)
    path = folder / f"{kind}.toml"
    write(run_of(kind), path)
    return path


def test_train_check_and_the_artifact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path, "labelled")
    assert cli.main(["check", str(path)]) == 0
    out, _ = capsys.readouterr()
    assert "Tokens a record, text of the training part" in out and "parameters" in out
    folder = tmp_path / "out"
    arguments = ["train", str(path), "training.steps=2", "-o", str(folder), "--json", "-q"]
    assert cli.main(arguments) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["finished"] and answer["step"] == 2 and answer["test"]["accuracy"]["count"] == 12
    seconds = answer["seconds"]
    assert 0 < seconds["waiting_for_data"] < seconds["train"]
    assert cli.main([a for a in arguments if a != "--json"]) == 0
    out = capsys.readouterr().out
    assert "macro_f1" in out
    assert f"{seconds['waiting_for_data'] / seconds['train']:.1%} of it waiting for data" in out
    assert cli.main(["check", answer["artifact"]]) == 0
    assert "agree" in capsys.readouterr().out
    weights = Path(answer["artifact"]) / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 0x40
    weights.write_bytes(bytes(data))
    assert cli.main(["check", answer["artifact"]]) == 1
    capsys.readouterr()


def test_bad_input_is_one_line_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path, "parallel")
    pairs = tmp_path / "pairs.tsv"
    good = pairs.read_text()
    cases = {
        "": "the file is empty",
        "ab\tba\n" * 9 + "ab\n": "line 10",
        good.replace("ab ba", "ab b\udcff", 1): "utf-8",
        good + "\tab\n": "empty",
    }
    for text, message in cases.items():
        pairs.write_bytes(text.encode("utf-8", "surrogateescape"))
        for arguments in (["check", str(path)], ["train", str(path), "-o", str(tmp_path / "run")]):
            assert cli.main(arguments) == 2
            error = capsys.readouterr().err.strip()
            assert message in error.lower() and len(error.splitlines()) == 1
        assert not (tmp_path / "run" / "checkpoints").exists()
        assert not (tmp_path / "run" / "artifact").exists()
    pairs.write_text(good)
    assert cli.main(["train", str(path), "training.stepz=3"]) == 2
    assert "did you mean 'steps'" in capsys.readouterr().err
    assert cli.main(["train", str(path), "data.max_source=3", "-o", str(tmp_path / "long")]) == 2
    assert "the limit is 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    "kind", ["translation", "language-model", "prefix", "classification", "tagging", "masked"]
)
def test_starters_are_valid_and_never_overwrite(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", kind]) == 0
    run = read(RunConfig, f"{kind}.toml")
    assert run.architecture().head is not None
    assert cli.main(["init", kind]) == 2
    assert "exists already" in capsys.readouterr().err
    assert cli.main(["init", kind, "-o", "mine.toml"]) == 0
    assert "isoform train mine.toml" in Path("mine.toml").read_text()


def test_a_run_that_was_refused_can_be_mended(tmp_path: Path) -> None:
    files(tmp_path)
    text = (tmp_path / "text.txt").read_bytes()
    (tmp_path / "text.txt").write_bytes(b"")
    with pytest.raises(IsoformError):
        train(run_of("lines"), tmp_path / "run", base=tmp_path, quiet=True)
    (tmp_path / "text.txt").write_bytes(text)
    result = train(run_of("lines", seed=2), tmp_path / "run", base=tmp_path, quiet=True)
    assert result.finished


def test_beginning_anew_touches_nothing_that_it_has_not_written(tmp_path: Path) -> None:
    """The run's folder may be where the user's own tokenizer lies."""
    files(tmp_path)
    own = [tmp_path / "tokenizer.json", tmp_path / "my_tokenizer.json"]
    for path in own:
        path.write_text("{}")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"tokenizer\.json: there already"):
            train(run_of("lines"), tmp_path, base=tmp_path, quiet=True)
    assert [path.read_text() for path in own] == ["{}", "{}"]
