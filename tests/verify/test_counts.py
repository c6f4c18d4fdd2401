"""Closed forms against the modules, component by component (R26)."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from isoform.config import presets
from isoform.nn import build
from isoform.verify.counts import Counts, count

SMALL = {"vocab_size": 30, "d_model": 16, "n_heads": 4, "ffn_width": 24}
BOTH = {**SMALL, "n_encoder_layers": 2, "n_decoder_layers": 3}
CONFIGS = {
    "original": presets.original(**BOTH),
    "pre_ln": presets.pre_ln(**BOTH),
    "bert": presets.bert(**SMALL, n_layers=2),
    "gpt_neox": presets.gpt_neox(**SMALL, n_layers=2, rotary_share=0.5),
    "gemma2": presets.gemma2(**SMALL, n_layers=4, n_kv_heads=2, head_width=6),
    "t5": presets.t5(**SMALL, n_layers=2),
    "qwen3": presets.qwen3(**SMALL, n_layers=2, n_kv_heads=2, head_width=6),
}
CONFIGS["res_post"] = CONFIGS["qwen3"].replace(decoder__layer__placement="res_post")
CONFIGS["shared"] = CONFIGS["pre_ln"].replace(decoder__layer_sharing=[0, 0, 2])
CONFIGS["memory_norm"] = CONFIGS["pre_ln"].replace(
    decoder__layer__memory_norm=CONFIGS["pre_ln"].decoder.layer.norm
)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_component_agrees(name: str):
    with torch.device("meta"):
        model = build(CONFIGS[name])
    counts = count(model)
    for row in counts.components:
        if row.counted is not None:
            assert row.total == row.counted, row.path
    assert counts.agree and counts.counted == sum(p.numel() for p in model.parameters())
    tops = [row for row in counts.components if row.depth == 0]
    assert sum(row.total for row in tops) == counts.total
    layers = [row for row in counts.components if row.depth == 2 and ".layers." in row.path]
    assert layers and all(row.counted is not None for row in layers)


def test_a_missing_parameter_is_seen_in_its_component():
    model = build(CONFIGS["pre_ln"])
    model.decoder.layers[1].feed_forward.body.up.bias = None
    counts = count(model)
    wrong = [row.path for row in counts.components if row.counted not in (None, row.total)]
    assert wrong == ["decoder", "decoder.layers.0-2", "decoder.layers.0-2.feed_forward"]
    assert not counts.agree


def test_totals_that_agree_do_not_hide_components_that_do_not():
    row = count(build(CONFIGS["bert"])).components[0]
    off = dataclasses.replace(row, counted=row.total + 1)
    assert not Counts((off,), 5, 5).agree and Counts((row,), 5, 5).agree


def test_repeats_multiply_down_the_tree():
    rows = {row.path: row for row in count(build(CONFIGS["pre_ln"])).components}
    query = rows["decoder.layers.0-2.attention.query"]
    assert (query.repeat, query.each, query.total) == (3, 16 * 16 + 16, 3 * (16 * 16 + 16))
    assert query.counted is None and query.depth == 3
