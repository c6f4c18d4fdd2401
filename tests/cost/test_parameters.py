"""Closed forms against the real modules' counts (R26, R27)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from isoform.config import Experts, Gated, ModelConfig, Projection, presets
from isoform.cost import count_parameters, layer_formula, parameters
from isoform.nn import build
from strategies import model_configs

GOLDEN = Path(__file__).parents[3] / "shared" / "spec" / "golden.json"


def counted(config: ModelConfig) -> int:
    with torch.device("meta"):
        return count_parameters(build(config))


@pytest.mark.parametrize("name", presets.PRESETS)
def test_presets(name: str):
    config = presets.PRESETS[name](vocab_size=1234)
    assert parameters(config).total == counted(config)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(model_configs())
def test_random_configurations(config: ModelConfig):
    found = parameters(config)
    assert found.total == counted(config)
    assert found.total == sum(part.total for part in found.root.parts)
    assert found.lookups + found.without_lookups == found.total
    assert found.active <= found.total
    for _, part in found.root.walk():
        if part.parts and part.formula is not None and part.shared_with is None:
            assert part.formula.value(part.sizes) == part.each


@pytest.mark.long
@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
@given(model_configs())
def test_many_random_configurations(config: ModelConfig):
    assert parameters(config).total == counted(config)


def layers(config: ModelConfig) -> tuple[int, ...]:
    """One encoder layer, one decoder layer, all of them."""
    assert config.encoder is not None and config.decoder is not None
    sizes = {"d": config.d_model, "f": 0}
    found = []
    for stack in (config.encoder, config.decoder):
        sizes["f"] = stack.layer.feed_forward.width
        found.append(layer_formula(stack.layer, config.d_model).value(sizes))
    return (*found, parameters(config).layers)


def test_the_chapters_numbers():
    base = presets.original(8000)
    assert layers(base) == (3_152_384, 4_204_032, 44_138_496)
    exercise = presets.original(8000, d_model=768, n_heads=12, ffn_width=3072)
    assert layers(exercise)[:2] == (7_087_872, 9_451_776)
    swiglu = Gated(width=2048, activation="silu", bias_gate=False, bias_up=False, bias_down=False)
    changed = exercise.replace(encoder__layer__feed_forward=swiglu, decoder__layer__feed_forward=swiglu)
    assert layers(changed)[:2] == (7_084_032, 9_447_936)


@pytest.mark.skipif(not GOLDEN.exists(), reason="golden.json is not beside the project")
def test_golden():
    golden = json.loads(GOLDEN.read_text())["parameters"]
    base, exercise = presets.original(8000), presets.original(8000, d_model=768, n_heads=12, ffn_width=3072)
    assert layers(base) == (
        golden["encoder_or_decoder_only_layer_d512_f2048"],
        golden["encoder_decoder_layer_d512_f2048"],
        golden["six_plus_six_layers_d512_f2048"],
    )
    assert layers(exercise)[0] == golden["encoder_layer_d768_f3072"]


def test_the_chapters_formulas():
    base = presets.original(8000)
    assert base.encoder is not None and base.decoder is not None
    assert str(layer_formula(base.encoder.layer, 512)) == "4d² + 2df + 9d + f"  # (6.34)
    assert str(layer_formula(base.decoder.layer, 512)) == "8d² + 2df + 15d + f"  # (6.35)
    llama = presets.llama(8000)
    assert llama.decoder is not None
    assert str(layer_formula(llama.decoder.layer, 4096)) == "4d² + 3df + 2d"


def test_shared_tables_count_once():
    tied = presets.original(50, d_model=8, n_heads=2, ffn_width=6)
    apart = presets.original(50, d_model=8, n_heads=2, ffn_width=6, shared_vocabulary=False)
    assert parameters(apart).total - parameters(tied).total == 50 * 8
    head = parameters(tied).root.parts[-1]
    assert head.parts[0].shared_with == "embedding.table" and head.total == 0


def test_shared_layers_count_once():
    base = presets.gpt2(50, d_model=8, n_heads=2, ffn_width=6, n_layers=3)
    shared = base.replace(decoder__layer_sharing=(0, 0, 2))
    lost = parameters(base).total - parameters(shared).total
    assert lost == parameters(base).layers // 3 and parameters(shared).total == counted(shared)


def test_active_parameters():
    base = presets.llama(50, d_model=8, n_heads=2, ffn_width=6, n_layers=2)
    assert base.decoder is not None
    expert = base.decoder.layer.feed_forward
    experts = Experts(
        n_experts=5, top_k=2, expert=expert, router_bias=True, router_order="top_k_then_softmax"
    )
    found = parameters(base.replace(decoder__layer__feed_forward=experts))
    assert found.total - found.active == 2 * 3 * (3 * 8 * 6)  # layers × idle experts × one expert
    names = dict(found.root.walk())
    assert str(names["decoder.layers.0-1.feed_forward"].formula) == "3Edf + Ed + E"


def test_a_projection_between_equal_widths():
    config = presets.bert(50, d_model=8, n_heads=2, ffn_width=6, n_layers=1)
    config = config.replace(embedding__projection=Projection(place="after_norm", bias=True))
    assert parameters(config).total == counted(config)


def test_without_allocating():
    """A 400B configuration: had anything been allocated, this would not end."""
    config = presets.llama(128_256, d_model=16_384, n_heads=128, n_kv_heads=8, ffn_width=53_248, n_layers=126)
    assert parameters(config).total == 405_853_388_800
