"""A run on several processes, as torchrun would start them."""

from __future__ import annotations

import multiprocessing
import os
import socket
from pathlib import Path
from typing import Any

import torch

from isoform.training import fit
from isoform.training.group import Group, joined
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


def learn(folder: Path, changes: dict[str, Any]) -> Any:
    model = toys.pair_model(dropout=0.2)
    validation = toys.pairs(11, seed=9, shuffle=None)
    result = fit(model, toys.pairs(max_tokens=40), validation, chosen(**changes), folder, quiet=True)
    return result, model


def process(rank: int, size: int, port: int, folder: Path, changes: dict[str, Any]) -> None:
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
        _, model = learn(folder, changes)
        assert model.tied()
        torch.save(weights(model), folder / f"given-{rank}.pt")


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def together(size: int, folder: Path, **changes: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = range(size)
    started = [FORKS.Process(target=process, args=(rank, size, port, folder, changes)) for rank in ranks]
    for one in started:
        one.start()
    for one in started:
        one.join()
    assert [one.exitcode for one in started] == [0] * size
