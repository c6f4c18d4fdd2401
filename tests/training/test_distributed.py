"""Several processes against one: the same update, whatever shares it out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isoform.training import fit
from isoform.training.checkpoint import Store
from isoform.training.warm_start import adapt
from training import toys
from training.runs import same, signalled
from training.several import STEPS, begun, chosen, learn, spelled, together, weights


def alike(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-10, atol=1e-10)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("single")
    _, model = learn(folder, {})
    torch.save(weights(model), folder / "given-0.pt")
    return folder


@pytest.mark.parametrize(
    ("size", "strategy"),
    [
        (2, "ddp"),
        (2, "fsdp"),
        pytest.param(4, "ddp", marks=pytest.mark.long),
        pytest.param(4, "fsdp", marks=pytest.mark.long),
    ],
)
def test_the_same_weights_on_any_number_of_processes(
    single: Path, tmp_path: Path, size: int, strategy: str
) -> None:
    """Five micro-batches of unequal counts for 2 or 4 processes: some have one less. Dropout is on."""
    together(size, tmp_path, **{"distributed.strategy": strategy})
    one, many = (Store(folder / "checkpoints") for folder in (single, tmp_path))
    for step in (10, 20):
        for file, tensors in one.files(step).items():
            alike(tensors, many.files(step)[file])
    for rank in range(size):
        alike(torch.load(single / "given-0.pt"), torch.load(tmp_path / f"given-{rank}.pt"))


ADAPTERS = {
    "lora": {"rank": 2, "alpha": 4.0, "targets": ("*.query", "*.up"), "learn_whole": ("*.before.weight",)}
}


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.long), "fsdp"])
def test_adapters_learn_alike_on_two_processes(tmp_path: Path, strategy: str) -> None:
    """Weights and factors lie in pieces, what learns beside what does not."""
    _, model = learn(tmp_path / "one", {**ADAPTERS, "steps": 6})
    together(2, tmp_path / "two", **ADAPTERS, steps=6, **{"distributed.strategy": strategy})
    alike(weights(model), torch.load(tmp_path / "two" / "given-1.pt"))
    begun = toys.pair_model(dropout=0.2)
    adapt(begun, chosen(**ADAPTERS))
    moved = {n for n, p in begun.named_parameters() if not torch.equal(p, weights(model)[n])}
    assert moved == {n for n, p in begun.named_parameters() if p.requires_grad}


def test_a_run_goes_on_with_another_number_of_processes(single: Path, tmp_path: Path) -> None:
    """Ten updates in pieces on two processes, the rest on one."""
    together(2, tmp_path, **{"distributed.strategy": "fsdp"})
    store = Store(tmp_path / "checkpoints")
    store.prune({10})
    result, _ = learn(tmp_path, {})
    assert result.finished and result.state.step == STEPS
    alike(Store(single / "checkpoints").weights(STEPS), store.weights(STEPS))


def test_ids_on_disk_are_learnt_from_alike_by_one_process_and_by_two(tmp_path: Path) -> None:
    """In memory without a break, on two processes from disk, and from disk stopped in the middle."""
    corpus = tmp_path / "words.tsv"
    words = [f"{a}{b}{c}" for a in "abcdefgh" for b in ("", "a", "cd") for c in ("", "b", "ghe")]
    corpus.write_text("".join(f"{word}\t{word[::-1]}\n" for word in words))
    changes = {"steps": 6, "accumulation": 3, "checkpoint_every": 2, "validate_every": 6}
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    validation = toys.pairs(11, seed=9, shuffle=None)
    models = [toys.pair_model(dropout=0.2) for _ in range(3)]
    fit(models[0], spelled(corpus, None), validation, chosen(**changes), one, quiet=True)
    stored = spelled(corpus, Path("ids"))
    with signalled(3):
        result = fit(models[1], stored, validation, chosen(**changes), three, quiet=True)
    assert result.stop == "signal" and result.state.step == 3
    assert fit(models[2], stored, validation, chosen(**changes), three, quiet=True).finished
    assert same(models[0], models[2])
    together(2, two, corpus, **changes)
    alike(weights(models[0]), torch.load(two / "given-0.pt"))


def test_what_the_first_process_cannot_write_is_every_process_error(tmp_path: Path) -> None:
    """None is left waiting for, or broken off by, the one that writes."""
    (tmp_path / "log.csv").mkdir()
    started = begun(2, tmp_path)
    for one in started:
        one.join()
    said = [(tmp_path / f"error-{rank}").read_text() for rank in range(2)]
    assert said[0] == said[1] and "log.csv" in said[0]
