"""Each fault is one clear line under the path its author wrote."""

from __future__ import annotations

import copy

import pytest

from isoform.config import Experts, Gated, ModelConfig, parse, presets
from isoform.errors import ConfigError

LLAMA = presets.llama(50, d_model=8, n_heads=2, ffn_width=6, n_layers=2).model_dump()
BERT = presets.bert(50, d_model=8, n_heads=2, ffn_width=6, n_layers=2).model_dump()


def fault(base, path, value="missing", *, rename=None):
    """The message after one change: a value set, or a key taken out, or renamed."""
    data = copy.deepcopy(base)
    *steps, last = path.split(".")
    node = data
    for step in steps:
        node = node[step]
    if rename is not None:
        node[rename] = node.pop(last)
    elif isinstance(value, str) and value == "missing":
        del node[last]
    else:
        node[last] = value
    with pytest.raises(ConfigError) as error:
        parse(ModelConfig, data)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_unknown_key_in_a_nested_union_reads_as_the_path_without_the_tag():
    message = fault(LLAMA, "decoder.layer.attention.positions.lay", "half")
    assert message == "decoder.layer.attention.positions.lay: unknown key; did you mean 'layout'?"


def test_a_misspelt_key_is_not_also_reported_as_missing():
    message = fault(LLAMA, "decoder.layer.attention.positions.layout", rename="layuot")
    assert message == "decoder.layer.attention.positions.layuot: unknown key; did you mean 'layout'?"


def test_unknown_key_with_no_near_name_lists_the_known_ones():
    message = fault(LLAMA, "head.colour", 1)
    assert message == "head.colour: unknown key; known: bias, kind, scale, softcap, tied, transform"


def test_unknown_key_in_a_list_of_optional_unions():
    expert = Gated(width=3, activation="silu", bias_gate=False, bias_up=False, bias_down=False)
    experts = Experts(
        n_experts=2, top_k=1, expert=expert, router_bias=False, router_order="top_k_then_softmax"
    )
    variant = {"layers": [1], "feed_forward": experts.model_dump()}
    variant["feed_forward"]["expert"]["bias_gat"] = variant["feed_forward"]["expert"].pop("bias_gate")
    message = fault(LLAMA, "decoder.variants", [variant])
    assert (
        message == "decoder.variants[0].feed_forward.expert.bias_gat: unknown key; did you mean 'bias_gate'?"
    )


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            "decoder.layer.placement",
            "prae",
            "'prae' is not one of post, pre, sandwich, res_post; did you mean 'pre'?",
        ),
        ("decoder.layer.norm.kind", "batch", "'batch' is not one of layer, rms"),
        ("decoder.layer.norm.eps", -1.0, "should be greater than or equal to 0, got -1.0"),
        ("decoder.layer.norm.eps", float("nan"), "should be a finite number, got nan"),
        ("decoder.layer.norm.gain_offset", 0.5, "0.5 is not one of 0.0, 1.0"),
        ("decoder.layer.attention.n_heads", "2", "should be a valid integer, got '2'"),
        ("decoder.layer.attention.n_heads", True, "should be a valid integer, got True"),
        ("decoder.layer.attention.n_heads", 2.5, "should be a valid integer, got 2.5"),
        ("decoder.layer.attention.n_heads", 0, "should be greater than 0, got 0"),
        ("decoder.layer.attention.bias.key", 1, "should be a valid boolean, got 1"),
        ("decoder.layer.attention.dropout", 1.0, "should be less than 1, got 1.0"),
        ("decoder.layer.attention.positions", "rotary", "expected a table of settings, got 'rotary'"),
        ("decoder.final_norm", 3, "expected a table of settings, got 3"),
        (
            "decoder.layer.attention.scale",
            "sqrt",
            "should be a valid number or 'inverse_sqrt_head_width', got 'sqrt'",
        ),
        (
            "decoder.layer.attention.scale",
            -1,
            "should be greater than 0 or 'inverse_sqrt_head_width', got -1",
        ),
    ],
)
def test_wrong_values(path, value, message):
    assert fault(LLAMA, path, value) == f"{path}: {message}"


def test_wrong_kind_of_part():
    message = fault(LLAMA, "decoder.layer.attention.positions", {"kind": "rotery"})
    assert message == (
        "decoder.layer.attention.positions.kind: 'rotery' is not one of none, rotary, alibi, "
        "relative_buckets; did you mean 'rotary'?"
    )


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("decoder.layer.norm.eps", "decoder.layer.norm.eps: required, and never implied"),
        (
            "decoder.layer.placement",
            "decoder.layer.placement: required, and never implied; one of post, pre, sandwich, res_post",
        ),
        ("decoder.layer.attention.scale", "decoder.layer.attention.scale: required, and never implied"),
        ("decoder.final_norm", "decoder.final_norm: required, and never implied"),
        (
            "decoder.layer.attention.positions.kind",
            "decoder.layer.attention.positions.kind: required, and never implied; "
            "one of none, rotary, alibi, relative_buckets",
        ),
    ],
)
def test_missing_keys(path, message):
    assert fault(LLAMA, path) == message


def test_contradiction_names_the_part():
    message = fault(LLAMA, "decoder.layer.attention.n_kv_heads", 3)
    assert message == "decoder.layer.attention: n_heads 2 is not a multiple of n_kv_heads 3"


def test_unknown_names_come_first_and_only_five_faults_are_shown():
    data = copy.deepcopy(BERT)
    layer = data["encoder"]["layer"]
    layer["attention"] = {"n_haeds": 2}
    layer["feed_forward"] = {"kind": "two_layer"}
    with pytest.raises(ConfigError) as error:
        parse(ModelConfig, data, where="run.toml")
    lines = [*str(error.value).split("; encoder"), str(error.value).rpartition("; ")[2]]
    assert str(error.value).startswith(
        "run.toml: encoder.layer.attention.n_haeds: unknown key; did you mean 'n_heads'?; encoder.layer."
    )
    # 6 fields of attention are required, less the misspelt one; 4 of the feed-forward network
    assert lines[-1] == "and 5 more"
    assert len(lines) - 1 == 5


def test_not_a_table_at_all():
    with pytest.raises(ConfigError, match="configuration: expected a table of settings"):
        parse(ModelConfig, [1])


def test_a_preset_has_to_be_expanded():
    with pytest.raises(ConfigError, match="preset: expand it first"):
        parse(ModelConfig, {"preset": "bert"})
