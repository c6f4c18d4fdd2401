"""The presets' exact values: the chapter's two (R16), and what sets each family apart."""

from __future__ import annotations

import inspect

import pytest

import isoform
from isoform.config import Alibi, ModelConfig, NoPositions, Norm, Sinusoidal, presets
from isoform.config.presets import PRESETS
from isoform.errors import ConfigError

LN = Norm(kind="layer", eps=1e-5, bias=True)


def leaves(value, path=""):
    """Every plain value of a configuration under its path."""
    if isinstance(value, dict):
        return {
            k: v for name, part in value.items() for k, v in leaves(part, f"{path}.{name}".strip(".")).items()
        }
    return {path: value}


@pytest.mark.parametrize(
    ("name", "placement", "activation"), [("original", "post", "relu"), ("pre_ln", "pre", "gelu")]
)
def test_the_chapters_presets(name, placement, activation):
    """R16, base size."""
    config = PRESETS[name](8000)
    assert config.structure == "encoder-decoder"
    assert config.d_model == 512
    for stack in (config.encoder, config.decoder):
        assert stack.n_layers == 6
        assert stack.final_norm == (LN if placement == "pre" else None)
        layer = stack.layer
        assert (layer.placement, layer.residual, layer.residual_source) == (placement, "sequential", "input")
        assert layer.norm == LN
        assert layer.memory_norm is None
        network = layer.feed_forward
        assert (network.kind, network.width, network.activation) == ("two_layer", 2048, activation)
        assert network.bias_up and network.bias_down
        for attention in filter(None, (layer.attention, layer.cross_attention)):
            assert (attention.n_heads, attention.n_kv_heads, attention.head_width) == (8, 8, 64)
            assert attention.score_scale == 64**-0.5
            assert attention.positions == NoPositions()
        assert {layer.residual_dropout, layer.attention.dropout, network.dropout} == {0.1}
    assert (config.encoder.visibility, config.decoder.visibility) == ("bidirectional", "causal")
    assert config.embedding.positions == Sinusoidal(
        layout="interleaved", spacing="half_width", offset=0, base=10_000.0, precision="float64"
    )
    assert config.embedding == config.source
    assert (config.embedding.scale, config.embedding.dropout, config.embedding.norm) == (
        "sqrt_d_model",
        0.1,
        None,
    )
    assert config.tie_source
    assert (config.head.tied, config.head.bias, config.head.transform) == (True, False, None)


def test_the_chapters_presets_differ_in_three_things():
    changed = (
        leaves(presets.original(8000).model_dump()).items()
        ^ leaves(presets.pre_ln(8000).model_dump()).items()
    )
    assert {path.rpartition(".final_norm")[0] or path for path, _ in changed} == {
        f"{stack}{field}"
        for stack in ("encoder", "decoder")
        for field in ("", ".layer.placement", ".layer.feed_forward.activation")
    }


def test_separate_vocabularies():
    config = presets.original(8000, source_vocab_size=5000, shared_vocabulary=False)
    assert (config.source.vocab_size, config.embedding.vocab_size, config.tie_source) == (5000, 8000, False)
    assert config.source.vocabulary != config.embedding.vocabulary


def test_public_place():
    assert isoform.presets.original(vocab_size=8000) == presets.original(8000)
    assert set(PRESETS) | {"PRESETS"} == set(presets.__all__)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_documented_and_take_a_vocabulary(name):
    function = PRESETS[name]
    assert function.__name__ == name
    assert inspect.getdoc(function)
    config = function(vocab_size=123)
    assert isinstance(config, ModelConfig)
    assert config.embedding.vocab_size == 123


# What sets each family apart, by path. Values are those of the released models named in the docstrings.
DISTINCT = {
    "bert": {
        "embedding.norm.eps": 1e-12,
        "embedding.n_token_types": 2,
        "encoder.layer.placement": "post",
        "encoder.layer.feed_forward.activation": "gelu",
        "head.transform.activation": "gelu",
        "head.bias": True,
    },
    "roberta": {
        "embedding.positions.offset": 2,
        "embedding.n_token_types": 1,
        "encoder.layer.norm.eps": 1e-5,
    },
    "distilbert": {
        "embedding.n_token_types": 0,
        "encoder.n_layers": 6,
        "encoder.layer.residual_dropout_on": "feed_forward",
        "encoder.layer.norm.eps": 1e-12,
    },
    "albert": {
        "embedding.width": 128,
        "embedding.projection.place": "after_norm",
        "encoder.layer_sharing": (0,) * 12,
        "encoder.layer.feed_forward.activation": "gelu_tanh",
        "encoder.layer.residual_dropout": 0.0,
    },
    "electra": {"embedding.width": 128, "d_model": 256, "head.n_labels": 1, "head.dense.activation": "gelu"},
    "gpt2": {
        "decoder.layer.feed_forward.activation": "gelu_tanh",
        "head.tied": True,
        "decoder.final_norm.eps": 1e-5,
    },
    "gpt_neox": {
        "embedding.vocab_size": 50_304,
        "decoder.layer.residual": "parallel",
        "decoder.layer.attention.positions.width": 16,
        "decoder.layer.feed_forward.activation": "gelu",
        "head.tied": False,
    },
    "opt": {
        "embedding.positions.offset": 2,
        "decoder.layer.feed_forward.activation": "relu",
        "decoder.layer.attention.dropout": 0.0,
        "decoder.layer.residual_dropout": 0.1,
        "embedding.dropout": 0.0,
    },
    "bloom": {
        "embedding.norm.eps": 1e-5,
        "decoder.layer.attention.positions.kind": "alibi",
        "decoder.layer.feed_forward.activation": "gelu_tanh",
        "decoder.layer.residual_dropout": 0.0,
    },
    "falcon": {
        "decoder.layer.residual": "parallel_shared_norm",
        "decoder.layer.attention.n_kv_heads": 1,
        "decoder.layer.attention.bias.query": False,
        "decoder.layer.feed_forward.activation": "gelu",
    },
    "phi": {
        "decoder.layer.residual": "parallel_shared_norm",
        "decoder.layer.attention.positions.width": 32,
        "head.tied": False,
        "head.bias": True,
    },
    "starcoder2": {
        "decoder.layer.attention.window": 4096,
        "decoder.layer.norm.kind": "layer",
        "decoder.layer.feed_forward.kind": "two_layer",
        "head.tied": True,
    },
    "llama": {
        "decoder.layer.norm.kind": "rms",
        "decoder.layer.norm.eps": 1e-6,
        "decoder.layer.norm.gain_after_cast": False,
    },
    "llama3": {"decoder.layer.attention.positions.scaling.kind": "llama3", "decoder.layer.norm.eps": 1e-5},
    "mistral": {"decoder.layer.attention.window": 4096, "decoder.layer.norm.eps": 1e-5},
    "mixtral": {
        "decoder.layer.attention.window": None,
        "decoder.layer.feed_forward.router_order": "softmax_then_top_k_renormalised",
        "decoder.layer.feed_forward.top_k": 2,
    },
    "qwen2": {"decoder.layer.attention.bias.value": True, "decoder.layer.attention.bias.output": False},
    "qwen3": {"decoder.layer.attention.qk_norm.axis": "head", "decoder.layer.attention.bias.query": False},
    "qwen3_moe": {"decoder.layer.feed_forward.n_experts": 128, "head.tied": False},
    "gemma": {
        "embedding.scale": "sqrt_d_model",
        "decoder.layer.norm.gain_offset": 1.0,
        "decoder.layer.norm.gain_after_cast": True,
        "decoder.layer.feed_forward.activation": "gelu_tanh",
    },
    "gemma2": {
        "decoder.layer.placement": "sandwich",
        "decoder.layer.attention.softcap": 50.0,
        "decoder.layer.attention.scale": 0.0625,
        "decoder.layer.attention.window": None,
        "head.softcap": 30.0,
    },
    "gemma3": {
        "decoder.layer.attention.softcap": None,
        "decoder.layer.attention.positions.theta": 1e6,
        "decoder.layer.attention.qk_norm.norm.gain_offset": 1.0,
        "head.softcap": None,
    },
    "olmo2": {
        "decoder.layer.placement": "res_post",
        "decoder.layer.attention.qk_norm.axis": "projection",
        "decoder.final_norm.gain_after_cast": True,
    },
    "t5": {
        "decoder.layer.attention.scale": 1.0,
        "encoder.layer.attention.positions.bidirectional": True,
        "decoder.layer.attention.positions.bidirectional": False,
        "decoder.layer.cross_attention.positions.kind": "none",
        "decoder.final_dropout": 0.1,
        "encoder.final_dropout": 0.1,
        "head.scale": "inverse_sqrt_d_model",
    },
    "bart": {
        "encoder.layer.placement": "post",
        "encoder.final_norm": None,
        "embedding.scale": 1.0,
        "embedding.norm.eps": 1e-5,
        "decoder.layer.feed_forward.dropout": 0.1,
        "head.bias": True,
    },
    "mbart": {
        "encoder.layer.placement": "pre",
        "embedding.scale": "sqrt_d_model",
        "embedding.norm.eps": 1e-5,
        "decoder.layer.feed_forward.dropout": 0.0,
    },
    "pegasus": {
        "embedding.positions.layout": "concatenated",
        "embedding.positions.spacing": "half_width",
        "embedding.norm": None,
        "encoder.layer.feed_forward.activation": "relu",
        "head.bias": True,
    },
    "m2m100": {
        "embedding.positions.spacing": "half_width_minus_one",
        "embedding.positions.offset": 2,
        "embedding.positions.precision": "float32",
        "head.bias": False,
    },
    "marian": {
        "encoder.layer.placement": "post",
        "embedding.positions.offset": 0,
        "embedding.positions.layout": "concatenated",
        "encoder.layer.feed_forward.activation": "silu",
        "head.bias": True,
    },
}


@pytest.mark.parametrize("name", DISTINCT)
def test_what_sets_a_family_apart(name):
    found = leaves(PRESETS[name]().model_dump())
    assert {path: found.get(path) for path in DISTINCT[name]} == DISTINCT[name]


def test_layers_that_differ():
    gemma2 = presets.gemma2(
        50, d_model=8, n_heads=2, n_kv_heads=1, head_width=4, ffn_width=6, n_layers=4
    ).decoder
    assert [layer.attention.window for layer in gemma2.layers()] == [4096, None, 4096, None]
    gemma3 = presets.gemma3(
        50, d_model=8, n_heads=2, n_kv_heads=1, head_width=4, ffn_width=6, n_layers=7
    ).decoder
    windows = [layer.attention.window for layer in gemma3.layers()]
    thetas = [layer.attention.positions.theta for layer in gemma3.layers()]
    assert windows == [512] * 5 + [None, 512]
    assert thetas == [10_000.0] * 5 + [1_000_000.0, 10_000.0]


def test_albert_in_groups():
    config = presets.albert(50, d_model=8, embedding_width=4, n_heads=2, ffn_width=6, n_layers=6, n_groups=2)
    assert config.encoder.layer_sharing == (0, 0, 0, 3, 3, 3)


def test_opt_350m():
    """The narrow member: Post-LN, no final norm, a projection on either side."""
    config = presets.opt(
        50, d_model=8, embedding_width=4, n_heads=2, ffn_width=6, n_layers=1, placement="post"
    )
    assert (config.d_model, config.embedding.width, config.decoder.final_norm) == (8, 4, None)
    assert config.embedding.projection.place == "before_positions"
    assert (config.head.transform.activation, config.head.transform.bias, config.head.tied) == (
        "identity",
        False,
        True,
    )


def test_falcon_with_alibi():
    config = presets.falcon(
        50, d_model=8, n_heads=2, n_kv_heads=2, n_layers=1, alibi=True, residual="sequential"
    )
    assert config.decoder.layer.attention.positions == Alibi(factor=0.5, rounding="bfloat16")


def test_t5_version_1_1():
    config = presets.t5(50, gated_activation="gelu_tanh", tied=False)
    assert (config.decoder.layer.feed_forward.kind, config.head.tied, config.head.scale) == (
        "gated",
        False,
        1.0,
    )


def test_torch_nn():
    """`torch.nn.Transformer` has a final norm in either placement; without bias norms have none either."""
    for norm_first in (False, True):
        config = presets.torch_nn(50, norm_first=norm_first, bias=False)
        assert config.encoder.final_norm == config.decoder.final_norm == LN.replace(bias=False)
        assert config.decoder.layer.placement == ("pre" if norm_first else "post")
        assert not config.decoder.layer.feed_forward.bias_up
        assert not config.decoder.layer.cross_attention.bias.key


@pytest.mark.parametrize("name", presets.PRESETS)
def test_heads_that_do_not_share_the_channels_out_are_refused(name):
    """Rounded down, the network would be another one, of other sizes, without a word."""
    settings = {"d_model": 250, "n_heads": 8}
    taken = inspect.signature(presets.PRESETS[name]).parameters
    if taken.get("head_width") is not None and taken["head_width"].default is not None:
        return  # these say the width themselves
    with pytest.raises(ConfigError, match=r"n_heads 8 does not divide d_model 250 \(R3\)"):
        presets.PRESETS[name](64, **settings)
