"""The committed examples, each on a small slice of its data."""

from __future__ import annotations

import gzip
import runpy
import sys
from pathlib import Path

import pytest

from isoform.checkpoints import load
from isoform.training import read_run, train

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
DATA = ROOT.parent / "shared" / "data"
SMALL = ("training.steps=3", "training.checkpoint_every=2", "training.validate_every=2", "model.d_model=24")
STACKS = ("model.n_encoder_layers=1", "model.n_decoder_layers=1", "model.ffn_width=32")
ONE = ("model.n_layers=1", "model.ffn_width=32")
PIECES = ("tokenizer.shared.vocab_size=400", "evaluation.max_new_tokens=6")


def source(name: str) -> Path:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"needs {path}")
    return path


def pairs(folder: Path) -> None:
    for part in ("train", "dev", "test"):
        name = f"{part}.en-de.tsv.gz"
        lines = gzip.decompress(source(f"tatoeba-subset/{name}").read_bytes()).decode().splitlines()
        count = 150 if part == "train" else 12
        (folder / name).write_bytes(gzip.compress("\n".join(lines[:count]).encode()))


def prepared(folder: Path, kind: str, origin: str, target: str, every: int) -> None:
    """What ``prepare.py`` makes, thinned out."""
    before = sys.argv
    sys.argv = ["prepare.py", kind, str(source(origin)), str(folder / target)]
    try:
        runpy.run_path(str(EXAMPLES / "prepare.py"), run_name="__main__")
    finally:
        sys.argv = before
    lines = (folder / target).read_text().splitlines()[::every]
    (folder / target).write_text("\n".join(lines) + "\n")


def run(folder: Path, name: str, *overrides: str) -> dict[str, float]:
    settings = read_run(EXAMPLES / f"{name}.toml", [*SMALL, *overrides])
    result = train(settings, folder / "run", base=folder, quiet=True)
    assert result.finished and result.fit.validation_nll is not None
    load(folder / "run" / "artifact", check=True)
    return {} if result.test is None else {metric: found["value"] for metric, found in result.test.items()}


def test_translation(tmp_path: Path) -> None:
    pairs(tmp_path)
    assert set(run(tmp_path, "translation", *STACKS, *PIECES)) == {"bleu", "chrf", "exact_match"}


def test_prefix_answers(tmp_path: Path) -> None:
    pairs(tmp_path)
    assert set(run(tmp_path, "prefix", *ONE, *PIECES)) == {"bleu", "chrf"}


def test_pronunciation(tmp_path: Path) -> None:
    prepared(tmp_path, "pronunciation", "cmudict/cmudict.dict.gz", "pronunciation.tsv", 800)
    first = (tmp_path / "pronunciation.tsv").read_text().splitlines()[0]
    assert first == "'bout\tB AW1 T"
    found = run(tmp_path, "pronunciation", *STACKS, "evaluation.max_new_tokens=6")
    assert set(found) == {"exact_match", "token_error_rate"}


def test_language_model(tmp_path: Path) -> None:
    text = source("tinyshakespeare/input.txt").read_text()
    (tmp_path / "input.txt").write_text(text[:6000])
    assert run(tmp_path, "language_model", *ONE) == {}


def test_classification(tmp_path: Path) -> None:
    prepared(tmp_path, "languages", "tatoeba-subset", "languages.tsv", 400)
    assert set(run(tmp_path, "classification", *ONE)) == {"accuracy", "macro_f1"}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_example_is_valid(path: Path) -> None:
    assert read_run(path).training.steps or read_run(path).training.epochs
