"""Configurations that contradict themselves are refused, with the reason."""

from __future__ import annotations

import pytest

from isoform.config import (
    Alibi,
    Attention,
    DynamicNtkScaling,
    Experts,
    Learned,
    LinearScaling,
    LongRopeScaling,
    NoPositions,
    Norm,
    Pooler,
    PoolingHead,
    Projection,
    RelativeBuckets,
    Rotary,
    Sinusoidal,
    TokenHead,
    Variant,
    parse,
    presets,
)
from isoform.config.presets.build import layer_norm, two_layer
from isoform.errors import ConfigError

BOTH = presets.pre_ln(50, d_model=8, n_heads=2, ffn_width=6, n_encoder_layers=2, n_decoder_layers=3)
GPT = presets.gpt2(50, d_model=8, n_heads=2, ffn_width=6, n_layers=3)
BERT = presets.bert(50, d_model=8, n_heads=2, ffn_width=6, n_layers=2)
BUCKETS = RelativeBuckets(n_buckets=4, max_distance=8, bidirectional=False)
POOLED = PoolingHead(pooling="mean", pooler=Pooler(activation="tanh", bias=True), normalise=True)


def wide(*layers, **changes):
    """A variant of GPT's attention."""
    return Variant(layers=layers, attention=GPT.decoder.layer.attention.replace(**changes))


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (GPT, {"decoder": None}, "set encoder, decoder or both"),
        (BOTH, {"source": None}, "source is needed exactly when both encoder and decoder are set"),
        (GPT, {"source": GPT.embedding}, "source is needed exactly when both"),
        (
            BOTH,
            {"decoder__layer__cross_attention": None},
            "decoder layers need cross_attention: there is an encoder",
        ),
        (
            GPT,
            {"decoder__layer__cross_attention": BOTH.decoder.layer.cross_attention},
            "there is no encoder to read",
        ),
        (
            BOTH,
            {"encoder__layer__cross_attention": BOTH.decoder.layer.cross_attention},
            "encoder layers cannot have cross_attention",
        ),
        (BOTH, {"decoder__visibility": "bidirectional"}, "would let a target read itself"),
        (BOTH, {"head": POOLED}, "head 'pooled' is for a single stack"),
        # embeddings
        (GPT, {"embedding__width": 4}, "embedding.width 4 differs from d_model 8: a projection is needed"),
        (
            GPT.replace(embedding__projection=Projection(place="after_norm", bias=True)),
            {"embedding__width": 4},
            "a tied head needs a transform from d_model 8 to embedding.width 4",
        ),
        (
            presets.m2m100(50, d_model=4, n_heads=2, ffn_width=6, n_layers=1),
            {
                "embedding__width": 2,
                "embedding__projection": Projection(place="after_norm", bias=True),
                "tie_source": False,
            },
            "embedding.positions: half_width_minus_one needs at least 4 channels, not 2",
        ),
        # sharing (R27)
        (GPT, {"tie_source": True}, "tie_source is set but there is no source"),
        (BOTH, {"source__vocabulary": "german"}, "source reads vocabulary 'german', target 'shared'"),
        (BOTH, {"source__vocab_size": 51}, "tie_source: source.vocab_size is 51, embedding.vocab_size is 50"),
        # layers
        (
            GPT,
            {"decoder__layer__residual": "parallel", "decoder__layer__placement": "post"},
            "placement 'pre', not 'post'",
        ),
        (
            BOTH,
            {"decoder__layer__residual": "parallel"},
            "residual 'parallel' has no place for cross_attention",
        ),
        (
            GPT,
            {"decoder__layer__residual_source": "normalised", "decoder__layer__placement": "sandwich"},
            "residual_source 'normalised' needs placement 'pre' and residual 'sequential'",
        ),
        (
            GPT,
            {"decoder__layer__residual_source": "normalised", "decoder__layer__residual": "parallel"},
            "residual_source 'normalised' needs placement 'pre' and residual 'sequential'",
        ),
        (
            GPT,
            {"decoder__layer__memory_norm": layer_norm(1e-5)},
            "memory_norm is set but there is no cross_attention",
        ),
        (BOTH, {"decoder__layer__cross_attention__positions": Alibi()}, "source and target count separately"),
        (BOTH, {"decoder__layer__cross_attention__window": 2}, "cross_attention.window must be unset"),
        # stacks
        (
            GPT,
            {"decoder__variants": (wide(3, window=2),)},
            "variants name layer 3, the stack has layers 0 to 2",
        ),
        (
            GPT,
            {"decoder__variants": (wide(0, 1, window=2), wide(1, window=3))},
            "two variants set attention of layer 1",
        ),
        (
            presets.falcon(50, d_model=8, n_heads=2, alibi=True, n_layers=1),
            {"decoder__visibility": "prefix"},
            "rounded alibi counts from the row's start, which needs visibility 'causal'",
        ),
        (GPT, {"decoder__layer_sharing": (0, 0)}, "layer_sharing has 2 entries for 3 layers"),
        (GPT, {"decoder__layer_sharing": (0, 0, 1)}, "layer_sharing[2] = 1: must name"),
        (GPT, {"decoder__layer_sharing": (0, 2, 2)}, "layer_sharing[1] = 2: must name"),
        (
            GPT,
            {"decoder__layer_sharing": (0, 0, 2), "decoder__variants": (wide(1, window=2),)},
            "layer_sharing: layer 1 is configured otherwise than layer 0",
        ),
        (
            GPT.replace(decoder__layer__attention__positions=BUCKETS),
            {"decoder__variants": (wide(1, positions=BUCKETS.replace(max_distance=9)),)},
            "one table serves the whole stack",
        ),
        (
            GPT.replace(decoder__layer__attention__positions=BUCKETS),
            {"decoder__variants": (wide(1, positions=BUCKETS, n_heads=4, n_kv_heads=4),)},
            "one table serves the whole stack",
        ),
    ],
)
def test_networks(base, changes, message):
    with pytest.raises(ConfigError) as error:
        base.replace(**changes)
    assert message in str(error.value)


ATTENTION = GPT.decoder.layer.attention.model_dump()
ROTARY = {"layout": "half", "theta": 10.0, "width": 4, "precision": "float32"}
EXPERT = two_layer(3, "relu", bias=False)


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        (Norm, {"kind": "rms", "eps": 1e-5, "bias": True}, "an rms norm has a gain only"),
        (
            Norm,
            {"kind": "layer", "eps": 1e-5, "bias": True, "gain": False},
            "a norm without gain has neither bias",
        ),
        (
            Norm,
            {"kind": "rms", "eps": 1e-5, "bias": False, "gain": False, "gain_offset": 1.0},
            "a norm without gain has neither bias nor gain_offset",
        ),
        (Attention, ATTENTION | {"n_kv_heads": 4}, "n_heads 2 is not a multiple of n_kv_heads 4"),
        (
            Attention,
            ATTENTION | {"positions": ROTARY | {"kind": "rotary", "width": 6}},
            "rotary width 6 exceeds head_width 4",
        ),
        (Rotary, ROTARY | {"width": 3}, "rotary width 3 must be even"),
        (
            Rotary,
            ROTARY | {"width": 2, "scaling": DynamicNtkScaling(factor=2.0, original_length=8)},
            "dynamic_ntk scaling needs a rotary width above 2",
        ),
        (
            Rotary,
            ROTARY
            | {
                "width": 4,
                "scaling": LongRopeScaling(
                    short=(1.0, 1.0), long=(2.0,), original_length=8, attention_factor=1.0
                ),
            },
            "longrope scaling has 1 long divisors for 2 pairs",
        ),
        (
            RelativeBuckets,
            {"n_buckets": 3, "max_distance": 9, "bidirectional": True},
            "there are 0 exact buckets",
        ),
        (RelativeBuckets, {"n_buckets": 8, "max_distance": 4, "bidirectional": False}, "4 must exceed them"),
        (
            Experts,
            {
                "n_experts": 2,
                "top_k": 3,
                "expert": EXPERT,
                "router_bias": False,
                "router_order": "top_k_then_softmax",
            },
            "top_k 3 exceeds n_experts 2",
        ),
        (Variant, {"layers": [0]}, "a variant must set attention or feed_forward"),
        (Variant, {"layers": [], "feed_forward": EXPERT}, "layers: "),
    ],
)
def test_parts(kind, data, message):
    with pytest.raises(ConfigError) as error:
        parse(kind, data)
    assert message in str(error.value)


def test_llama3_scaling_needs_a_band_between_its_factors():
    scaling = presets.llama3(
        50, d_model=8, n_heads=2, n_kv_heads=1, ffn_width=6
    ).stack.layer.attention.positions.scaling
    with pytest.raises(ConfigError, match="low_frequency_factor 4 must be below high_frequency_factor 4"):
        scaling.replace(low_frequency_factor=4.0)


def test_a_source_of_the_same_size_is_not_the_same_vocabulary():
    """R27: the same ids, not the same size."""
    apart = presets.original(50, d_model=8, n_heads=2, ffn_width=6, shared_vocabulary=False)
    assert apart.source.vocab_size == apart.embedding.vocab_size
    with pytest.raises(ConfigError, match="a shared row must mean the same token"):
        apart.replace(tie_source=True)


def test_what_looks_odd_and_is_allowed():
    BERT.replace(encoder__visibility="causal")  # R18: any stack under any mask
    GPT.replace(decoder__visibility="bidirectional")
    GPT.replace(
        embedding__projection=Projection(place="before_positions", bias=False)
    )  # same width, as in ALBERT
    GPT.replace(decoder__layer__attention__head_width=3)  # R3
    GPT.replace(decoder__layer__attention__positions=Rotary(**ROTARY, scaling=LinearScaling(factor=2.0)))
    GPT.replace(embedding__positions=NoPositions(), head=TokenHead(tied=False, bias=True))
    positions = Sinusoidal(
        layout="interleaved", spacing="half_width", offset=0, base=100.0, precision="float64"
    )
    GPT.replace(embedding__positions=positions)
    assert GPT.replace(embedding__positions=Learned(max_positions=3, offset=1)).max_positions() == 3


@pytest.mark.parametrize("path", ["decoder.final_norm", "decoder.layer.norm", "embedding.norm"])
def test_eps_zero_is_for_the_worked_example_alone(path):
    """R5: it has no value on constant vectors."""
    zero = {path: layer_norm(0.0)}
    with pytest.raises(ConfigError, match=rf"{path}\.eps is 0"):
        GPT.replace(**zero)
    assert GPT.replace(**zero, zero_eps=True).zero_eps
