"""The table of shapes (R25)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from isoform.config import Experts, ModelConfig, presets
from isoform.cost import parameters, shapes
from isoform.errors import ConfigError
from isoform.nn import build
from strategies import model_configs


def test_the_chapters_table():
    config = presets.pre_ln(30, d_model=12, n_heads=3, ffn_width=20, n_encoder_layers=2, n_decoder_layers=4)
    rows = shapes(config, batch=2, length=7, source_length=5)
    table = {row.operation: tuple(row[1:]) for row in rows}
    layer = "decoder.layers.0-3"
    assert table[f"{layer}.attention.qkv"] == ("[2, 7, 12]", "[36, 12], [36]", "[2, 7, 36]")
    assert table[f"{layer}.attention.queries (split heads)"][2] == "[2, 3, 7, 4]"
    assert table[f"{layer}.attention.scores (QKᵀ · scale)"] == (
        "[2, 3, 7, 4], [2, 3, 7, 4]",
        "",
        "[2, 3, 7, 7]",
    )
    assert table[f"{layer}.attention.weights (softmax)"][2] == "[2, 3, 7, 7]"
    assert table[f"{layer}.attention.context (read, merge heads)"][2] == "[2, 7, 12]"
    assert table[f"{layer}.attention.output"] == ("[2, 7, 12]", "[12, 12], [12]", "[2, 7, 12]")
    assert table[f"{layer}.attention.sum (residual sum)"] == ("[2, 7, 12], [2, 7, 12]", "", "[2, 7, 12]")
    assert table[f"{layer}.cross_attention.key_value"] == ("[2, 5, 12]", "[24, 12], [24]", "[2, 5, 24]")
    assert table[f"{layer}.cross_attention.scores (QKᵀ · scale)"][2] == "[2, 3, 7, 5]"
    assert table[f"{layer}.feed_forward.up"] == ("[2, 7, 12]", "[20, 12], [20]", "[2, 7, 20]")
    assert table[f"{layer}.feed_forward.down"] == ("[2, 7, 20]", "[12, 20], [12]", "[2, 7, 12]")
    assert table["head"] == ("[2, 7, 12]", "[30, 12]", "[2, 7, 30]")
    assert table["encoder.layers.0-1.attention.weights (softmax)"][2] == "[2, 3, 5, 5]"
    order = [row.operation for row in rows]
    assert order.index("source") < order.index("encoder.final_norm") < order.index("embedding")
    qkv = order.index(f"{layer}.attention.qkv")
    assert (
        qkv
        < order.index(f"{layer}.attention.scores (QKᵀ · scale)")
        < order.index(f"{layer}.attention.output")
    )


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(model_configs())
def test_every_module_with_parameters_is_there(config: ModelConfig):
    source = 4 if config.source is not None else None
    rows = shapes(config, batch=2, length=6, source_length=source)
    listed = " ".join(row.parameters for row in rows)
    with torch.device("meta"):
        model = build(config)
    for name, parameter in model.named_parameters():
        assert str(list(parameter.shape)) in listed, name
    assert all(row.output for row in rows)


def test_layers_that_differ_have_rows_of_their_own():
    config = presets.gemma2(
        30, d_model=12, n_heads=2, n_kv_heads=1, head_width=6, ffn_width=9, n_layers=5, window=3
    )
    names = {row.operation.split(".attention")[0] for row in shapes(config, batch=1, length=4)}
    assert {"decoder.layers.0-4/2", "decoder.layers.1,3"} <= names


def test_any_size():
    """400B parameters in 128 experts, without allocating."""
    base = presets.llama(128_256, d_model=5120, n_heads=40, n_kv_heads=8, ffn_width=8192, n_layers=24)
    assert base.decoder is not None
    experts = Experts(
        n_experts=128, top_k=1, expert=base.decoder.layer.feed_forward, router_bias=False,
        router_order="sigmoid_then_top_k",
    )  # fmt: skip
    config = base.replace(decoder__layer__feed_forward=experts)
    assert parameters(config).total > 380e9
    rows = shapes(config, batch=4, length=8192)
    assert ("[4, 8192, 5120]", "[128, 16384, 5120], [128, 5120, 8192]", "[4, 8192, 5120]") in [
        row[1:] for row in rows
    ]


def test_lengths_that_do_not_fit():
    with pytest.raises(ConfigError, match="exceeds the 8 learned positions"):
        shapes(presets.gpt2(30, d_model=12, n_heads=3, ffn_width=9, max_positions=8), batch=1, length=9)
