"""Time at a machine's limits."""

from __future__ import annotations

import dataclasses

import pytest

from isoform.config import presets
from isoform.cost import Machine, Workload, flops, measure_machine, memory, parameters, roofline
from isoform.cost.products import products
from isoform.errors import ConfigError

CONFIG = presets.llama(500, d_model=64, n_heads=4, n_kv_heads=2, ffn_width=96, n_layers=3)
MACHINE = Machine("cpu", "float32", flops=1e11, bandwidth=1e10)


def test_decode_is_bound_by_the_weights():
    """At batch 1 every weight is read for two FLOPs: the time is that of reading weights and cache."""
    found = roofline(CONFIG, Workload("decode", 1, 2), MACHINE)
    assert found.bound == "bandwidth" and found.intensity < 1 < found.balance == 10
    count = parameters(CONFIG)
    matrices = 4 * (count.without_lookups - 7 * 64)  # norms are no products
    assert found.bandwidth_seconds == pytest.approx(matrices / 1e10, rel=0.05)
    assert found.seconds == pytest.approx(found.bandwidth_seconds)
    assert found.tokens_per_second == pytest.approx(1 / found.seconds)


def test_prefill_is_bound_by_products():
    work = Workload("prefill", 8, 512)
    found = roofline(CONFIG, work, dataclasses.replace(MACHINE, bandwidth=1e12))
    assert found.bound == "compute"
    assert found.compute_seconds == flops(CONFIG, work).forward / 1e11
    assert found.seconds >= found.compute_seconds


def test_training():
    work = Workload("train", 8, 128)
    found = roofline(CONFIG, work, MACHINE)
    names = {part.name: part for part in found.components}
    held = memory(CONFIG, work)
    assert names["optimizer"].bytes == 2 * (held.weights + held.gradients + held.optimizer)
    assert sum(part.flops for part in found.components) == flops(CONFIG, work).model
    again = dataclasses.replace(work, recomputation="layer")
    total = sum(part.flops for part in roofline(CONFIG, again, MACHINE).components)
    assert total == flops(CONFIG, again).hardware


def test_twice_the_machine_takes_half_the_time():
    work = Workload("train", 8, 128)
    twice = Machine("cpu", "float32", flops=2e11, bandwidth=2e10)
    assert roofline(CONFIG, work, twice).seconds == pytest.approx(roofline(CONFIG, work, MACHINE).seconds / 2)


def test_few_tokens_wake_few_experts():
    from isoform.config import Experts

    assert CONFIG.decoder is not None
    experts = Experts(
        n_experts=64, top_k=2, expert=CONFIG.decoder.layer.feed_forward, router_bias=False,
        router_order="top_k_then_softmax",
    )  # fmt: skip
    config = CONFIG.replace(decoder__layer__feed_forward=experts)

    def awake(batch: int) -> int:
        found = products(config, Workload("decode", batch, 9))
        up = next(p for p in found if p.name.endswith("experts.up"))
        return up.weights.value(up.sizes) // (64 * 96)

    assert awake(1) == 2 and 2 < awake(8) < 16 and awake(1000) == 64


def test_measuring_a_machine():
    found = measure_machine(seconds=0.02)
    assert found.device == "cpu" and found.dtype == "float32"
    assert 1e8 < found.flops < 1e16 and 1e7 < found.bandwidth < 1e14


def test_refusals():
    with pytest.raises(ConfigError, match="must be positive"):
        roofline(CONFIG, Workload("decode", 1, 2), dataclasses.replace(MACHINE, flops=0))
    with pytest.raises(ConfigError, match="'float12' is not known"):
        measure_machine("float12")  # pyright: ignore[reportArgumentType]
