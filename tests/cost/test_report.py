"""The whole report, and the counters."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from isoform.config import presets
from isoform.cost import Machine, cost, count_flops, count_parameters, flops, measure_memory, memory

CONFIG = presets.pre_ln(30, d_model=12, n_heads=3, ffn_width=20, n_encoder_layers=2, n_decoder_layers=2)


@pytest.mark.parametrize("mode", ["train", "prefill", "decode"])
def test_plain_data(mode: str):
    machine = Machine("cpu", "float32", 1e11, 1e10)
    report = cost(CONFIG, batch=2, length=7, source_length=5, mode=mode, machine=machine)
    data = json.loads(json.dumps(report.to_dict()))
    assert list(data) == ["work", "parameters", "flops", "memory", "roofline"]
    assert data["work"]["mode"] == mode and data["work"]["source_length"] == 5
    assert data["flops"]["forward"] == flops(CONFIG, report.work).forward
    assert data["memory"]["peak"] == memory(CONFIG, report.work).peak
    assert data["roofline"]["seconds"] > 0 and data["parameters"]["components"][0]["name"] == "embedding"
    assert cost(CONFIG, batch=2, length=7, source_length=5, mode=mode).roofline is None


def test_the_largest_networks_take_no_memory():
    """Shapes alone: 405B parameters would be 1.6 TB."""
    config = presets.llama(128_256, d_model=16_384, n_heads=128, n_kv_heads=8, ffn_width=53_248, n_layers=126)
    report = cost(
        config, batch=16, length=8192, dtype="bfloat16_autocast", devices=16, shard="fsdp",
        recomputation="layer", device="cuda", loss="chunked",
    )  # fmt: skip
    assert report.memory.weights == 4 * 405_853_388_800 // 16


def test_closed_forms_need_no_torch():
    code = (
        "import sys; from isoform.config import presets; from isoform.cost import cost, fit;"
        "r = cost(presets.gpt2(), batch=1, length=8); fit(presets.gpt2(), r.work, 10**9);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_counting():
    layer = torch.nn.Linear(3, 5)
    layer.again = layer.weight
    assert count_parameters(layer) == 20
    assert count_flops(lambda: layer(torch.ones(7, 3))) == 2 * 7 * 3 * 5


def test_memory_is_followed_as_it_comes_and_goes():
    kept = torch.ones(1000)
    with measure_memory(kept) as use:
        assert use.before == use.current == 4000
        a = kept * 2
        b = a.view(10, 100)  # a view is no new memory
        assert use.current == 8000
        del a
        assert use.current == 8000
        del b
        assert use.current == 4000
        (kept + 1).sum()
    assert use.peak == 8004 and use.peak_at == "aten.sum.default"


def test_memory_of_a_backward_pass_without_data():
    layer = torch.nn.Linear(256, 256, bias=False, device="meta")
    with measure_memory(layer) as use:
        layer(torch.ones(1024, 256, device="meta")).sum().backward()
    assert use.current >= 2 * 4 * 256 * 256 and use.peak > 2 * 4 * 1024 * 256
