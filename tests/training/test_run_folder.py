"""What a run has left: found again where its data lie, and refused in one line where it is damaged."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from isoform import cli

SCATTER = [
    '{"sha256": 3, "fit": 1, "test": 2}',
    *(pytest.param(content, marks=pytest.mark.long) for content in ("", "{", "[]", "\x00\x01")),
]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run in ``run``, its data in ``data``, its run file elsewhere."""
    folder = tmp_path_factory.mktemp("done")
    data, own = folder / "data", folder / "own"
    data.mkdir()
    own.mkdir()
    text = "".join(f"{'abcdefg'[i % 7] * (1 + i % 3)} {'abc'[i % 3]}\n" for i in range(60))
    (data / "text.txt").write_text(text)
    (own / "letters.toml").write_text(
        """
        [model]
        preset = "gpt2"
        d_model = 8
        n_heads = 2
        ffn_width = 16
        n_layers = 1
        max_positions = 16
        [data]
        kind = "text"
        documents = "lines"
        train = "text.txt"
        split = { validation = 0.2, test = 0.2, order = "random", seed = 0 }
        [tokenizer.shared]
        kind = "characters"
        [training]
        seed = 1
        steps = 4
        checkpoint_every = 2
        precision = "auto"
        batches = { kind = "tokens", max_tokens = 60 }
        schedule = { kind = "constant", lr = 0.01 }
        """
    )
    assert cli.main(_train(folder, folder / "run")) == 0
    return folder


def _train(done: Path, run: Path) -> list[str]:
    return ["train", str(done / "own/letters.toml"), "--data", str(done / "data"), "-o", str(run), "-q"]


def test_a_runs_own_file_finds_its_data(
    done: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    run = str(done / "run" / "run.toml")
    assert cli.main(["evaluate", str(done / "run/artifact"), "--data", run, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["scores"]["nll"]["value"]
    kept = json.loads((done / "run" / "result.json").read_text())["test"]["nll"]["value"]
    assert found == pytest.approx(kept, abs=1e-6)
    assert cli.main(["check", run]) == 0
    # A run file that no run has left starts beside itself.
    assert cli.main(["check", str(done / "own/letters.toml")]) == 2
    assert "own/text.txt: no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    [
        "data.json",
        "result.json",
        "precision.json",
        "request.toml",
        "tokenizer.json",
        "tokenizer.specials.json",
    ],
)
@pytest.mark.parametrize("content", SCATTER)
def test_whatever_is_damaged_is_named(
    done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(done / "run", run)
    (run / name).write_text(content)
    before = {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}
    capsys.readouterr()
    status, said = cli.main(_train(done, run)), capsys.readouterr().err
    assert status == 2 and said.count("\n") == 1 and str(run / name) in said, said
    assert {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()} == before


@pytest.mark.parametrize("when", ["tokenizing", "trying", "scoring", "saving"])
def test_terminated_in_any_phase_it_leaves_nothing_half_written_and_goes_on(
    done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    from isoform.checkpoints import Bundle
    from isoform.data import streaming
    from isoform.training import scoring

    module, name = {
        "tokenizing": (streaming, "keys_of"),
        "trying": (sys.modules["isoform.training.train"], "preflight"),
        "scoring": (scoring, "score"),
        "saving": (Bundle, "save"),
    }[when]
    true, calls = getattr(module, name), [0]

    def terminated(*given: object, **named: object) -> object:
        calls[0] += 1
        found = true(*given, **named)
        if calls[0] == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    monkeypatch.setattr(module, name, terminated)
    text = done / "data" / "text.txt"
    (tmp_path / "train.txt").write_text("".join(text.read_text().splitlines(True)[:40]))
    (tmp_path / "dev.txt").write_text("".join(text.read_text().splitlines(True)[40:]))
    run = tmp_path / "run"
    command = [
        "train", str(done / "own/letters.toml"), "--data", str(tmp_path), "-o", str(run), "-q",
        "data.train=train.txt", "data.validation=dev.txt", "data.test=dev.txt", "data.split=none",
        'data.store={folder="ids"}', "training.precision=float32",
    ]  # fmt: skip
    assert cli.main(command) == 143
    assert capsys.readouterr().err.split() == ["terminated"]
    assert not [path for path in tmp_path.rglob(".*") if path.name != ".lock"]
    assert (run / "artifact").is_dir() == (when == "saving")
    assert cli.main(command) == 0
    assert (run / "result.json").is_file() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
