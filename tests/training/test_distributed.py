"""Several processes against one: the same update, whatever shares it out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isoform.training.checkpoint import Store
from training.several import STEPS, learn, together, weights


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


def test_a_run_goes_on_with_another_number_of_processes(single: Path, tmp_path: Path) -> None:
    """Ten updates in pieces on two processes, the rest on one."""
    together(2, tmp_path, **{"distributed.strategy": "fsdp"})
    store = Store(tmp_path / "checkpoints")
    store.prune({10})
    result, _ = learn(tmp_path, {})
    assert result.finished and result.state.step == STEPS
    alike(Store(single / "checkpoints").weights(STEPS), store.weights(STEPS))
