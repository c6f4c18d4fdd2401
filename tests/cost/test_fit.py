"""The batch and the length that fit into a memory."""

from __future__ import annotations

import dataclasses

import pytest

from isoform.config import presets
from isoform.cost import Workload, fit, memory
from isoform.errors import ConfigError

CONFIG = presets.llama(100, d_model=64, n_heads=4, ffn_width=96, n_layers=3)
WORK = Workload("train", 4, 32)


def peak(work: Workload, **changes) -> int:
    return memory(CONFIG, dataclasses.replace(work, **changes)).peak


@pytest.mark.parametrize("work", [WORK, Workload("decode", 4, 32), Workload("prefill", 4, 32)])
def test_the_largest_is_the_last_that_fits(work: Workload):
    limit = 8_000_000
    found = fit(CONFIG, work, limit)
    assert found.peak == peak(work) and found.fits == (found.peak <= limit)
    assert peak(work, batch=found.largest_batch) <= limit < peak(work, batch=found.largest_batch + 1)
    assert peak(work, length=found.largest_length) <= limit < peak(work, length=found.largest_length + 1)
    assert found.limited_by == "memory"


def test_exactly_the_limit():
    found = fit(CONFIG, WORK, peak(WORK))
    assert found.fits and (found.largest_batch, found.largest_length) == (4, 32)
    less = fit(CONFIG, WORK, peak(WORK) - 1)
    assert not less.fits and less.largest_batch == 3 and less.largest_length == 31


def test_nothing_fits():
    found = fit(CONFIG, WORK, 1000)
    assert (found.largest_batch, found.largest_length) == (0, 0)


def test_learned_positions_end_the_length():
    config = presets.gpt2(100, d_model=64, n_heads=4, ffn_width=96, n_layers=3, max_positions=50)
    found = fit(config, WORK, 10**9)
    assert found.largest_length == 50 and found.limited_by == "positions"


def test_devices_multiply_the_batch():
    shared = dataclasses.replace(WORK, devices=3, shard="ddp")
    assert fit(CONFIG, shared, 8_000_000).largest_batch == 3 * fit(CONFIG, WORK, 8_000_000).largest_batch


def test_no_memory():
    with pytest.raises(ConfigError, match="at least 1"):
        fit(CONFIG, WORK, 0)
