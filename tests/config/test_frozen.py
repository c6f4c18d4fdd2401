"""Frozen values, and copies with something changed (R15, R17)."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from pydantic import ValidationError

from isoform.config import (
    Gated,
    ModelConfig,
    Norm,
    TwoLayer,
    Variant,
    difference,
    presets,
)
from isoform.errors import ConfigError
from strategies import model_configs

BASE = presets.pre_ln(50, d_model=8, n_heads=2, ffn_width=6, n_encoder_layers=1, n_decoder_layers=2)


def test_fields_cannot_be_set():
    with pytest.raises(ValidationError, match="frozen"):
        BASE.d_model = 4
    with pytest.raises(ValidationError, match="frozen"):
        BASE.decoder.layer.norm.eps = 0.1


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(config=model_configs())
def test_equal_values_are_one_key(config):
    again = ModelConfig.model_validate(config.model_dump())
    assert {config: 1}[again] == 1


def test_replace_reaches_nested_fields_and_lists():
    changed = BASE.replace(decoder__layer__placement="post", encoder__layer__attention__dropout=0.5)
    assert changed.decoder.layer.placement == "post"
    assert changed.encoder.layer.attention.dropout == 0.5
    assert BASE.decoder.layer.placement == "pre"
    variant = Variant(layers=(1,), attention=BASE.decoder.layer.attention)
    windowed = BASE.replace(decoder__variants=(variant,)).replace(
        **{"decoder.variants.0.attention.window": 3}
    )
    assert [layer.attention.window for layer in windowed.decoder.layers()] == [None, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"decoder__layer__placemen": "pre"},
            "decoder.layer.placemen: unknown key; did you mean 'placement'?",
        ),
        (
            {"decoder__lyer__placement": "pre"},
            "decoder__lyer__placement: no field 'lyer'; did you mean 'layer'?",
        ),
        ({"d_model__x": 1}, "d_model__x: 8 has no field 'x'"),
        (
            {"decoder__layer__memory_norm__eps": 1.0},
            "decoder__layer__memory_norm__eps: memory_norm is not set, so it has no field 'eps'",
        ),
        (
            {"decoder.variants.0.attention.window": 1},
            "decoder.variants.0.attention.window: no entry '0'; there are 0, counted from 0",
        ),
        ({"d_model": "8"}, "d_model: should be a valid integer, got '8'"),
    ],
)
def test_replace_refuses_what_does_not_exist(change, message):
    with pytest.raises(ConfigError) as error:
        BASE.replace(**change)
    assert str(error.value) == message


GATED = Gated(width=6, activation="gelu", bias_gate=True, bias_up=True, bias_down=True, dropout=0.1)
RMS = Norm(kind="rms", eps=1e-5, bias=False)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("decoder.layer.placement", "post"),
        ("decoder.layer.placement", "sandwich"),
        ("decoder.layer.placement", "res_post"),
        ("decoder.layer.norm", RMS),
        ("decoder.layer.feed_forward.activation", "relu"),
        ("decoder.layer.feed_forward", GATED),
        ("decoder.final_norm", None),
        ("decoder.layer.residual_scale", 0.5),
        ("decoder.visibility", "prefix"),
    ],
)
def test_settings_are_independent(field, value):
    """R15: one changed setting is one difference, whatever else is set, and in one stack only."""
    for base in (BASE, BASE.replace(encoder__layer__placement="post", encoder__layer__norm=RMS)):
        changed = base.replace(**{field: value})
        assert [d.path for d in difference(base, changed)] == [field]


def test_gating_keeps_the_activation_of_the_two_layer_network():
    gated = BASE.replace(decoder__layer__feed_forward=GATED)
    assert isinstance(BASE.decoder.layer.feed_forward, TwoLayer)
    assert gated.decoder.layer.feed_forward.activation == BASE.decoder.layer.feed_forward.activation
    assert gated.decoder.layer.norm == BASE.decoder.layer.norm
