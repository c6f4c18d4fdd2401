"""A run on several processes, as torchrun would start them."""

from __future__ import annotations

import multiprocessing
import os
import socket
from pathlib import Path
from typing import Any

import torch

from isoform.data import Characters, ParallelData, Store, Task, TokenBudget, TokenizersConfig, Tsv, prepare
from isoform.training import fit
from isoform.training.group import Group, joined
from isoform.training.warm_start import adapt
from training import toys
from training.runs import settings

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["isoform.training", "isoform.training.loop", "matplotlib.figure", "matplotlib.backends.backend_agg"]
)
STEPS = 20


def chosen(**changes: Any) -> Any:
    # Key biases have no gradient but rounding, which a small eps would blow up.
    base: dict[str, Any] = {
        "steps": STEPS,
        "precision": "float64",
        "optimizer.eps": 0.01,
        "accumulation": 5,
        "checkpoint_every": 10,
        "validate_every": 10,
        "average_last": 2,
        "z_loss": 1e-3,
        "ema": 0.9,
    }
    return settings(**{**base, **changes})


def learn(folder: Path, changes: dict[str, Any], corpus: Path | None = None) -> Any:
    model = toys.pair_model(dropout=0.2)
    adapt(model, chosen(**changes))
    validation = toys.pairs(11, seed=9, shuffle=None)
    train = toys.pairs(max_tokens=40) if corpus is None else spelled(corpus, Path("ids"))
    result = fit(model, train, validation, chosen(**changes), folder, quiet=True)
    return result, model


def spelled(corpus: Path, store: Path | None) -> Any:
    """The batches of words and what they are backwards, in memory or kept as ids on disk."""
    data = ParallelData(
        format=Tsv(source=1, target=2),
        train=Path(corpus.name),
        store=None if store is None else Store(folder=store),
    )
    task = Task(data, TokenBudget(max_tokens=40, pool=64), corpus.parent, seed=5)
    return prepare(task, TokenizersConfig(shared=Characters())).train.batches


def process(
    rank: int, size: int, port: int, folder: Path, changes: dict[str, Any], corpus: Path | None
) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    with joined("cpu") as group:
        assert group == Group(rank, size)
        try:
            _, model = learn(folder, changes, corpus)
        except Exception as error:
            (folder / f"error-{rank}").write_text(f"{type(error).__name__}: {error}")
            raise
        assert model.tied()
        torch.save(weights(model), folder / f"given-{rank}.pt")


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def together(size: int, folder: Path, corpus: Path | None = None, **changes: Any) -> None:
    """A whole run."""
    started = begun(size, folder, corpus, **changes)
    for one in started:
        one.join()
    assert [one.exitcode for one in started] == [0] * size


def begun(size: int, folder: Path, corpus: Path | None = None, **changes: Any) -> list[Any]:
    """The processes of a run that has begun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = range(size)
    given = (size, port, folder, changes, corpus)
    started = [FORKS.Process(target=process, args=(rank, *given)) for rank in ranks]
    for one in started:
        one.start()
    return started
