"""Each part of a configuration as a phrase. Two parts that differ never read the same.

Numbers are written in full (the shortest decimal that gives the same float back), and whatever a phrase
leaves out is the absence of an operation.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from isoform.config.embedding import Projection
from isoform.config.heads import Pooler, PoolingHead, SequenceHead, TaggingHead, TokenHead, Transform
from isoform.config.parts import Attention, AttentionBias, Experts, Gated, Norm, QKNorm, TwoLayer
from isoform.config.positions import (
    Alibi,
    DynamicNtkScaling,
    Learned,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NoPositions,
    NoScaling,
    RelativeBuckets,
    Rotary,
    Sinusoidal,
    YarnScaling,
)

ACTIVATIONS = {
    "identity": "no activation",
    "relu": "ReLU",
    "relu_squared": "squared ReLU",
    "gelu": "exact GELU",
    "gelu_tanh": "tanh GELU",
    "quick_gelu": "quick GELU",
    "silu": "SiLU",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "elu": "ELU",
    "leaky_relu": "leaky ReLU",
    "softplus": "softplus",
    "mish": "Mish",
}
GATES = {
    "identity": "bilinear gate",
    "sigmoid": "GLU",
    "relu": "ReGLU",
    "gelu": "GEGLU with the exact GELU",
    "gelu_tanh": "GEGLU with the tanh GELU",
    "silu": "SwiGLU",
}
SPACING = {"half_width": "d/2", "half_width_minus_one": "d/2 - 1"}
ROUTING = {
    "softmax_then_top_k": "softmax, then the top {k} as they are",
    "softmax_then_top_k_renormalised": "softmax, then the top {k} renormalised",
    "top_k_then_softmax": "the top {k}, then softmax",
    "sigmoid_then_top_k": "sigmoid, then the top {k} as they are",
    "sigmoid_then_top_k_renormalised": "sigmoid, then the top {k} renormalised",
}
POOLING = {"mean": "mean of the real tokens", "first": "first real token", "last": "last real token"}


def number(value: float) -> str:
    """The shortest decimal that gives the same float back: 10000, 0.1, 1e-5."""
    text = repr(value).removesuffix(".0")
    return text.replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def quoted(text: str) -> str:
    """A name of the user's in double quotes."""
    return json.dumps(text, ensure_ascii=False)


def listed(words: Iterable[str]) -> str:
    """a, b and c."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def joined(*parts: str | None) -> str:
    """The parts that are there, separated by commas."""
    return ", ".join(part for part in parts if part)


def dropped(share: float, what: str = "dropout") -> str | None:
    """ "dropout 0.1", or nothing."""
    return f"{what} {number(share)}" if share else None


def gate(activation: str) -> str:
    """The name of a gated network with this activation."""
    return GATES.get(activation, f"gate with {ACTIVATIONS.get(activation, activation)}")


def biases(present: dict[str, bool]) -> str:
    """Which of the named biases are there."""
    names = [name for name, there in present.items() if there]
    if not names:
        return "no biases"
    return "all biases" if len(names) == len(present) else f"bias on {listed(names)}"


def norm(part: Norm) -> str:
    """LayerNorm (eps 1e-5, gain and bias)."""
    gain = "gain 1 + w" if part.gain_offset else "gain"
    if part.kind == "rms":
        name, affine = "RMSNorm", gain if part.gain else "no gain"
    else:
        name, affine = "LayerNorm", f"{gain} and bias" if part.bias else f"{gain}, no bias"
        affine = affine if part.gain else "neither gain nor bias"
    rounded = "rounded after the gain" if part.gain_after_cast else None
    return f"{name} ({joined(f'eps {number(part.eps)}', affine, rounded)})"


def numbers(values: tuple[float, ...]) -> str:
    """A list of numbers."""
    return ", ".join(number(value) for value in values)


def scaling(part: Any) -> str:
    """What is done to rotary frequencies."""
    if isinstance(part, LinearScaling):
        return f"positions divided by {number(part.factor)}"
    if isinstance(part, DynamicNtkScaling):
        return f"dynamic NTK × {number(part.factor)} beyond {part.original_length}"
    if isinstance(part, Llama3Scaling):
        return (
            f"Llama 3 scaling × {number(part.factor)} beyond {part.original_length} "
            f"(low {number(part.low_frequency_factor)}, high {number(part.high_frequency_factor)})"
        )
    if isinstance(part, LongRopeScaling):
        return (
            f"LongRoPE beyond {part.original_length} (frequencies over {numbers(part.short)}, then over "
            f"{numbers(part.long)}, cos and sin × {number(part.attention_factor)})"
        )
    if isinstance(part, YarnScaling):
        ends = "whole" if part.truncate else "fractional"
        return (
            f"YaRN × {number(part.factor)} beyond {part.original_length} (fast {number(part.beta_fast)}, "
            f"slow {number(part.beta_slow)}, {ends} ends, cos and sin × {number(part.attention_factor)})"
        )
    return "unscaled"


def positions(part: Any) -> str:
    """Positions of either place."""
    if isinstance(part, Sinusoidal):
        return (
            f"{part.layout} sinusoids (base {number(part.base)}, spaced over {SPACING[part.spacing]}, "
            f"from position {part.offset}, in {part.precision})"
        )
    if isinstance(part, Learned):
        return f"{part.max_positions} learned positions from row {part.offset}"
    if isinstance(part, Rotary):
        return (
            f"rotary positions on {part.width} channels ({part.layout} layout, theta {number(part.theta)}, "
            f"{scaling(part.scaling)}, in {part.precision})"
        )
    if isinstance(part, Alibi):
        factor = f"bias × {number(part.factor)}" if part.factor != 1 else None
        rounded = f"rounded to {part.rounding}" if part.rounding != "none" else None
        extra = joined(factor, rounded)
        return f"ALiBi ({extra})" if extra else "ALiBi"
    if isinstance(part, RelativeBuckets):
        side = "for past and future" if part.bidirectional else "for the past"
        return f"{part.n_buckets} relative buckets {side}, up to distance {part.max_distance}"
    return "no positions"


def qk_norm(part: QKNorm) -> str:
    """Normalisation of queries and keys."""
    axis = "each head" if part.axis == "head" else "the whole projection"
    return f"{norm(part.norm)} on queries and keys over {axis} {part.order.replace('_', ' the ')}"


def score_scale(value: float | str) -> str:
    """Multiplier of the scores."""
    return "1/√(head width)" if isinstance(value, str) else number(value)


def attention_bias(part: AttentionBias) -> str:
    """Which projections have a bias."""
    return biases(part.model_dump())


def attention(part: Attention) -> str:
    """All of attention in one phrase."""
    if part.n_kv_heads == part.n_heads:
        heads = f"{part.n_heads} {'head' if part.n_heads == 1 else 'heads'} of width {part.head_width}"
    else:
        few = "head" if part.n_kv_heads == 1 else "heads"
        heads = f"{part.n_heads} query heads on {part.n_kv_heads} key/value {few} of width {part.head_width}"
    return joined(
        heads,
        f"scores × {score_scale(part.scale)}",
        attention_bias(part.bias),
        positions(part.positions),
        qk_norm(part.qk_norm) if part.qk_norm else None,
        f"scores capped at {number(part.softcap)}" if part.softcap else None,
        f"window of {part.window}" if part.window else None,
        dropped(part.dropout, "dropout on weights"),
    )


def feed_forward(part: TwoLayer | Gated | Experts) -> str:
    """Any feed-forward network in one phrase."""
    if isinstance(part, TwoLayer):
        there = biases({"up": part.bias_up, "down": part.bias_down})
        return joined(f"{part.width} units", ACTIVATIONS[part.activation], there, dropped(part.dropout))
    if isinstance(part, Gated):
        there = biases({"gate": part.bias_gate, "up": part.bias_up, "down": part.bias_down})
        return joined(f"{part.width} gated units", gate(part.activation), there, dropped(part.dropout))
    return joined(
        f"{part.n_experts} experts",
        f"weights by {ROUTING[part.router_order].format(k=part.top_k)}",
        f"weights × {number(part.router_scale)}" if part.router_scale != 1 else None,
        "router bias" if part.router_bias else "no router bias",
        f"load-balancing loss × {number(part.load_balance)}" if part.load_balance else None,
        f"each expert {feed_forward(part.expert)}",
    )


def projection(part: Projection) -> str:
    """The map from the table's width."""
    place = "before the positions" if part.place == "before_positions" else "after norm and dropout"
    return f"projected to the model's width {place} {'with' if part.bias else 'without'} bias"


def dense(part: Pooler | Transform) -> str:
    """A dense layer with its activation, and its norm where it has one."""
    after = norm(part.norm) if isinstance(part, Transform) and part.norm else None
    return joined(
        f"dense layer {'with' if part.bias else 'without'} bias", ACTIVATIONS[part.activation], after
    )


def head(part: TokenHead | SequenceHead | TaggingHead | PoolingHead | None) -> str:
    """What is read off the last states."""
    if part is None:
        return "none, the last states are the output"
    if isinstance(part, TokenHead):
        scale = "1/√(model width)" if isinstance(part.scale, str) else number(part.scale)
        return joined(
            dense(part.transform) if part.transform else None,
            f"states × {scale}" if part.scale != 1 else None,
            "scores by the embedding table (tied)" if part.tied else "scores by a matrix of its own (untied)",
            "bias" if part.bias else "no bias",
            f"scores capped at {number(part.softcap)}" if part.softcap else None,
        )
    if isinstance(part, TaggingHead):
        return joined(
            dense(part.dense) if part.dense else None,
            dropped(part.dropout),
            f"{part.n_labels} labels a token {'with' if part.bias else 'without'} bias",
        )
    pooled = joined(
        POOLING[part.pooling],
        dropped(part.input_dropout) if isinstance(part, SequenceHead) else None,
        dense(part.pooler) if part.pooler else "no dense layer",
    )
    if isinstance(part, SequenceHead):
        scores = f"{part.n_labels} labels a sequence {'with' if part.bias else 'without'} bias"
        return joined(pooled, dropped(part.dropout), scores)
    return joined(pooled, "divided by its norm" if part.normalise else "not normalised")


def part(value: Any) -> str:
    """Any part, number, switch or name."""
    makers: dict[type, Any] = {
        Norm: norm, QKNorm: qk_norm, Attention: attention, AttentionBias: attention_bias,
        TwoLayer: feed_forward, Gated: feed_forward, Experts: feed_forward,
        NoPositions: positions, Sinusoidal: positions, Learned: positions, Rotary: positions,
        Alibi: positions, RelativeBuckets: positions,
        NoScaling: scaling, LinearScaling: scaling, DynamicNtkScaling: scaling, Llama3Scaling: scaling,
        YarnScaling: scaling, LongRopeScaling: scaling,
        Projection: projection, Pooler: dense, Transform: dense,
        TokenHead: head, SequenceHead: head, TaggingHead: head, PoolingHead: head,
    }  # fmt: skip
    if type(value) in makers:
        return makers[type(value)](value)
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, tuple):
        return f"({', '.join(part(item) for item in value)})"
    return str(value)
