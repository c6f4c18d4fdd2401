"""A run on two processes that is killed again and again is the run that nobody touched."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from isoform.training.checkpoint import Store
from isoform.training.log import read_log
from training.runs import figures
from training.several import begun, together

KILLS, STEPS = 10, 40


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_killed_at_ten_random_moments(tmp_path: Path, strategy: str) -> None:
    changes = {
        "steps": STEPS,
        "checkpoint_every": 3,
        "validate_every": 8,
        "log_every": 1,
        "distributed.strategy": strategy,
    }
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    together(2, whole, **changes)
    generator = np.random.default_rng(20)
    for moment in sorted(generator.choice(np.arange(1, STEPS - 2), KILLS, replace=False).tolist()):
        processes = begun(2, broken, **changes)
        while last_step(broken) < moment:
            assert all(process.is_alive() for process in processes), "it ended by itself"
            time.sleep(0.01)
        time.sleep(generator.uniform(0.0, 0.15))  # somewhere in an update, or in writing a checkpoint
        for rank in generator.permutation(2).tolist():
            processes[rank].kill()
        for process in processes:
            process.join()
            assert process.exitcode == -9
    together(2, broken, **changes)
    one, other = Store(whole / "checkpoints"), Store(broken / "checkpoints")
    assert one.steps() == other.steps() and one.steps()[-1] == STEPS
    for step in one.steps():
        mine, theirs = one.files(step), other.files(step)
        assert mine.keys() == theirs.keys()
        for name in mine:
            for key, value in mine[name].items():
                assert torch.equal(value, theirs[name][key]), (step, name, key)
    assert figures(whole) == figures(broken)
    for rank in range(2):
        given = [torch.load(folder / f"given-{rank}.pt") for folder in (whole, broken)]
        assert all(torch.equal(given[0][name], given[1][name]) for name in given[0])


def last_step(folder: Path) -> int:
    lines = read_log(folder / "log.csv")
    return lines[-1].step if lines else 0
