"""The words for every field that changes the function: what it says, and how its values read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from isoform.config import phrases
from isoform.config.phrases import numbers, part
from isoform.config.stack import Variant

Say = Callable[[Any], str]
Subject = tuple[str, Say]

# How the steps of a path read; the steps that are fields themselves are in SUBJECTS.
PLACES = {
    "embedding": "embedding",
    "source": "source embedding",
    "layer": "layers",
    "variants": "variant",
    "attention": "self-attention",
    "cross_attention": "cross-attention",
    "feed_forward": "feed-forward",
    "expert": "expert",
    "norm": "norm",
    "final_norm": "final norm",
    "memory_norm": "memory norm",
    "qk_norm": "query/key norm",
    "bias": "",
    "positions": "positions",
    "scaling": "scaling",
    "projection": "projection",
    "transform": "dense layer",
    "pooler": "dense layer",
    "dense": "dense layer",
    "head": "head",
}


def _words(names: Mapping[Any, str]) -> Say:
    return lambda value: names[value]


def _or_number(names: Mapping[Any, str]) -> Say:
    return lambda value: names[value] if value in names else part(value)


def _there(value: Any) -> str:
    return "absent" if value is None or value is False else "there"


def _variants(value: tuple[Variant, ...]) -> str:
    texts: list[str] = []
    for variant in value:
        parts = phrases.joined(
            f"self-attention {part(variant.attention)}" if variant.attention else None,
            f"feed-forward {part(variant.feed_forward)}" if variant.feed_forward else None,
        )
        texts.append(f"layers {_numbers(variant.layers)} with {parts}")
    return "; ".join(texts) if texts else "none"


def _numbers(value: tuple[int, ...]) -> str:
    return ", ".join(map(str, value))


WIDTH: Subject = ("width", part)
DROPOUT: Subject = ("dropout", part)
ACTIVATION: Subject = ("activation", _words(phrases.ACTIVATIONS))
BIAS: Subject = ("bias", _there)
POOLING: Subject = ("vector from the", _words(phrases.POOLING))
LABELS: Subject = ("labels", part)
DENSE: Subject = ("dense layer", part)
FACTOR: Subject = ("factor", part)
LENGTH: Subject = ("original length", part)
POSITIONS: Subject = ("positions", part)
NORM: Subject = ("norm", part)
ROUTING = {name: text.format(k="k") for name, text in phrases.ROUTING.items()}

SUBJECTS: dict[str, dict[str, Subject]] = {
    "ModelConfig": {
        "format": ("format", part),
        "d_model": ("model width", part),
        "embedding": ("embedding", _there),
        "source": ("source embedding", _there),
        "tie_source": ("source table", _words({True: "the target's (shared)", False: "its own"})),
        "encoder": ("encoder", _there),
        "decoder": ("decoder", _there),
        "head": ("head", part),
        "zero_eps": ("norms with eps 0", _words({True: "allowed", False: "refused"})),
    },
    "Embedding": {
        "vocabulary": ("vocabulary", phrases.quoted),
        "vocab_size": ("rows", part),
        "width": WIDTH,
        "projection": ("projection", part),
        "scale": ("rows times", _or_number({"sqrt_d_model": "√(model width)"})),
        "positions": POSITIONS,
        "n_token_types": ("token types", part),
        "norm": NORM,
        "dropout": DROPOUT,
    },
    "Projection": {
        "place": ("placed", lambda value: str(value).replace("_", " the ")),
        "bias": BIAS,
    },
    "Stack": {
        "n_layers": ("layers", part),
        "visibility": ("visibility", part),
        "layer": ("layer", _there),
        "variants": ("variants", _variants),
        "final_norm": ("final norm", part),
        "final_dropout": ("dropout after the final norm", part),
        "layer_sharing": ("layers whose parameters are used", _numbers),
    },
    "Variant": {
        "layers": ("layers", _numbers),
        "attention": ("self-attention", part),
        "feed_forward": ("feed-forward", part),
    },
    "Layer": {
        "placement": (
            "norm",
            _words(
                {
                    "post": "after the residual sum (post)",
                    "pre": "before the sublayer (pre)",
                    "sandwich": "before and after the sublayer (sandwich)",
                    "res_post": "after the sublayer, before the sum (res_post)",
                }
            ),
        ),
        "residual": (
            "sublayers",
            _words(
                {
                    "sequential": "in sequence",
                    "parallel": "in parallel with a norm each",
                    "parallel_shared_norm": "in parallel behind one norm",
                }
            ),
        ),
        "residual_source": (
            "increments added to",
            _words({"input": "the stream itself", "normalised": "the normalised stream"}),
        ),
        "residual_scale": ("increments times", part),
        "norm": NORM,
        "attention": ("self-attention", part),
        "cross_attention": ("cross-attention", part),
        "memory_norm": ("norm on the memory", part),
        "feed_forward": ("feed-forward", part),
        "residual_dropout": ("dropout on the increments", part),
        "residual_dropout_on": (
            "dropout on the increments of",
            _words({"all": "all sublayers", "attention": "attention", "feed_forward": "the feed-forward"}),
        ),
    },
    "Norm": {
        "kind": ("kind", part),
        "eps": ("eps", part),
        "gain": ("gain", _there),
        "bias": BIAS,
        "gain_offset": ("gain", _words({0.0: "w", 1.0: "1 + w"})),
        "gain_after_cast": (
            "rounding to half precision",
            _words({True: "after the gain", False: "before the gain"}),
        ),
    },
    "AttentionBias": {
        name: (f"bias of the {name} projection", _there) for name in ("query", "key", "value", "output")
    },
    "QKNorm": {
        "norm": NORM,
        "axis": ("over", _words({"head": "each head", "projection": "the whole projection"})),
        "order": ("placed", lambda value: str(value).replace("_", " the ")),
    },
    "Attention": {
        "n_heads": ("query heads", part),
        "n_kv_heads": ("key/value heads", part),
        "head_width": ("head width", part),
        "scale": ("scores times", phrases.score_scale),
        "bias": ("biases", part),
        "positions": POSITIONS,
        "qk_norm": ("query/key norm", part),
        "softcap": ("cap on the scores", part),
        "window": ("window", part),
        "dropout": ("dropout on the weights", part),
    },
    "TwoLayer": {
        "width": ("hidden units", part),
        "activation": ACTIVATION,
        "bias_up": ("bias on the way up", _there),
        "bias_down": ("bias on the way down", _there),
        "dropout": DROPOUT,
    },
    "Gated": {
        "width": ("hidden units", part),
        "activation": ("gate", phrases.gate),
        "bias_gate": ("bias of the gate", _there),
        "bias_up": ("bias on the way up", _there),
        "bias_down": ("bias on the way down", _there),
        "dropout": DROPOUT,
    },
    "Experts": {
        "n_experts": ("experts", part),
        "top_k": ("experts a token", part),
        "expert": ("each expert", part),
        "router_bias": ("bias of the router", _there),
        "router_order": ("weights by", _words(ROUTING)),
        "router_scale": ("weights times", part),
        "load_balance": ("load-balancing loss times", part),
    },
    "NoPositions": {},
    "Sinusoidal": {
        "layout": ("sines and cosines", part),
        "spacing": ("frequencies spaced over", _words(phrases.SPACING)),
        "offset": ("first position", part),
        "base": ("base", part),
        "precision": ("computed in", part),
    },
    "Learned": {
        "max_positions": ("longest sequence", part),
        "offset": ("row of the first position", part),
    },
    "Rotary": {
        "layout": ("pairs of channels", _words({"half": "half a width apart", "interleaved": "interleaved"})),
        "theta": ("theta", part),
        "width": ("rotated channels", part),
        "scaling": ("scaling", part),
        "precision": ("computed in", part),
    },
    "NoScaling": {},
    "LinearScaling": {"factor": FACTOR},
    "DynamicNtkScaling": {"factor": FACTOR, "original_length": LENGTH},
    "Llama3Scaling": {
        "factor": FACTOR,
        "low_frequency_factor": ("low-frequency factor", part),
        "high_frequency_factor": ("high-frequency factor", part),
        "original_length": LENGTH,
    },
    "LongRopeScaling": {
        "short": ("divisors of short rows", numbers),
        "long": ("divisors of long rows", numbers),
        "original_length": LENGTH,
        "attention_factor": ("cosines and sines times", part),
    },
    "YarnScaling": {
        "factor": FACTOR,
        "original_length": LENGTH,
        "beta_fast": ("fast end", part),
        "beta_slow": ("slow end", part),
        "attention_factor": ("cosines and sines times", part),
        "truncate": ("ends of the ramp", _words({True: "whole channels", False: "fractional"})),
    },
    "Alibi": {
        "factor": ("bias times", part),
        "rounding": ("rounding", part),
    },
    "RelativeBuckets": {
        "n_buckets": ("buckets", part),
        "max_distance": ("largest distance", part),
        "bidirectional": ("buckets for", _words({True: "past and future", False: "the past alone"})),
    },
    "TokenHead": {
        "tied": ("output matrix", _words({True: "the embedding table (tied)", False: "its own (untied)"})),
        "bias": BIAS,
        "transform": DENSE,
        "scale": ("states times", _or_number({"inverse_sqrt_d_model": "1/√(model width)"})),
        "softcap": ("cap on the scores", part),
    },
    "Transform": {"activation": ACTIVATION, "bias": BIAS, "norm": NORM},
    "Pooler": {"activation": ACTIVATION, "bias": BIAS},
    "SequenceHead": {
        "n_labels": LABELS,
        "pooling": POOLING,
        "input_dropout": ("dropout on the pooled vector", part),
        "pooler": DENSE,
        "bias": BIAS,
        "dropout": DROPOUT,
    },
    "TaggingHead": {"n_labels": LABELS, "dense": DENSE, "bias": BIAS, "dropout": DROPOUT},
    "PoolingHead": {
        "pooling": POOLING,
        "pooler": DENSE,
        "normalise": ("divided by its norm", part),
    },
}
