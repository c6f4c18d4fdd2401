"""The parts a layer is configured from: normalisation, attention, feed-forward.

A field has a default only where the default is the *absence* of an operation (no cap, no window, no
dropout, scale one). Whatever chooses between two functions of the same shape has to be written.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from isoform.config.base import Count, Dropout, Flag, Frozen, NonNegative, Positive
from isoform.config.positions import (
    AddedPositions,
    Alibi,
    AttentionPositions,
    DynamicNtkScaling,
    Learned,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NoPositions,
    NoScaling,
    RelativeBuckets,
    Rotary,
    RotaryScaling,
    Sinusoidal,
    YarnScaling,
)

__all__ = [
    "ActivationName",
    "AddedPositions",
    "Alibi",
    "Attention",
    "AttentionBias",
    "AttentionPositions",
    "Dropout",
    "DynamicNtkScaling",
    "Experts",
    "FeedForward",
    "Gated",
    "Learned",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "NoPositions",
    "NoScaling",
    "Norm",
    "QKNorm",
    "RelativeBuckets",
    "Rotary",
    "RotaryScaling",
    "Sinusoidal",
    "TwoLayer",
    "YarnScaling",
]

ActivationName = Literal[
    "identity",
    "relu",
    "relu_squared",
    "gelu",
    "gelu_tanh",
    "quick_gelu",
    "silu",
    "sigmoid",
    "tanh",
    "elu",
    "leaky_relu",
    "softplus",
    "mish",
]


def _zero_or_one(value: float) -> float:
    if value not in (0.0, 1.0):
        raise ValueError(f"{value:g} is not one of 0.0, 1.0")
    return value


# `Literal` does not take floats.
GainOffset = Annotated[
    float,
    Field(strict=True),
    AfterValidator(_zero_or_one),
    WithJsonSchema({"type": "number", "enum": [0.0, 1.0]}),
]


class Norm(Frozen):
    """A normalisation over the feature axis (6.13–6.14, 6.18)."""

    kind: Literal["layer", "rms"]
    """LayerNorm subtracts the mean and divides by the standard deviation; RMSNorm divides by the root mean
    square."""
    eps: NonNegative
    """Added inside the root. Zero is for the hand-worked example only (R5)."""
    gain: Flag = True
    """Whether a trained gain multiplies the result."""
    bias: Flag
    """Whether a trained bias is added; LayerNorm only."""
    gain_offset: GainOffset = 0.0
    """1.0 multiplies by 1 + w instead of w (Gemma)."""
    gain_after_cast: Flag = False
    """In half precision, the normalised value is rounded to the input's dtype before the gain multiplies it
    (false: Llama, T5) or after (true: Gemma, OLMo 2). In float32 and float64 they are the same function."""

    @model_validator(mode="after")
    def _consistent(self) -> Norm:
        if self.kind == "rms" and self.bias:
            raise ValueError("an rms norm has a gain only; bias must be false")
        if not self.gain and (self.bias or self.gain_offset):
            raise ValueError("a norm without gain has neither bias nor gain_offset")
        return self


class AttentionBias(Frozen):
    """Which of the four projections have a bias."""

    query: Flag
    """Bias of the query projection."""
    key: Flag
    """Bias of the key projection."""
    value: Flag
    """Bias of the value projection."""
    output: Flag
    """Bias of the output projection."""


class QKNorm(Frozen):
    """Normalisation of queries and keys (R42)."""

    norm: Norm
    """The norm; queries and keys have a gain each."""
    axis: Literal["head", "projection"]
    """Over the channels of each head, with one gain for all heads (head: Qwen 3, Gemma 3, Phi), or over all
    heads together (projection: OLMo 2)."""
    order: Literal["before_rotation", "after_rotation"]
    """Whether it comes before or after the rotary embedding."""


class Attention(Frozen):
    """Multi-head, grouped-query or multi-query attention (6.1–6.2, R42)."""

    n_heads: Count
    """Query heads."""
    n_kv_heads: Count
    """Key/value heads; each serves n_heads / n_kv_heads query heads in a row."""
    head_width: Count
    """Channels of one head; n_heads · head_width need not be d_model (R3)."""
    scale: Positive | Literal["inverse_sqrt_head_width"]
    """Multiplies the scores: a number, or inverse_sqrt_head_width for 1/sqrt(head_width)."""
    bias: AttentionBias
    """Which projections have a bias."""
    positions: AttentionPositions
    """What attention knows of the positions."""
    qk_norm: QKNorm | None = None
    """Normalisation of queries and keys."""
    softcap: Positive | None = None
    """c replaces scores by c·tanh(scores/c), before the mask (Gemma 2)."""
    window: Count | None = None
    """How many positions a query reads, itself included: i - window < j ≤ i, and both sides
    |i - j| < window where the visibility is bidirectional."""
    dropout: Dropout = 0.0
    """Share of attention weights dropped in training."""

    @model_validator(mode="after")
    def _consistent(self) -> Attention:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}")
        if isinstance(self.positions, Rotary) and self.positions.width > self.head_width:
            raise ValueError(f"rotary width {self.positions.width} exceeds head_width {self.head_width}")
        return self

    @property
    def score_scale(self) -> float:
        """The scale as a number."""
        return self.head_width**-0.5 if self.scale == "inverse_sqrt_head_width" else float(self.scale)


class TwoLayer(Frozen):
    """A feed-forward network phi(x W1 + b1) W2 + b2 (6.3)."""

    kind: Literal["two_layer"] = "two_layer"
    width: Count
    """Hidden units f; free, not 4·d_model."""
    activation: ActivationName
    """phi. gelu is the exact one (6.6), gelu_tanh its approximation (6.8), quick_gelu x·sigmoid(1.702 x)."""
    bias_up: Flag
    """Whether b1 is there."""
    bias_down: Flag
    """Whether b2 is there."""
    dropout: Dropout = 0.0
    """Share of hidden units dropped in training."""


class Gated(Frozen):
    """A gated feed-forward network [g(x Wg + bg) * (x Wu + bu)] Wd + bd (6.9)."""

    kind: Literal["gated"] = "gated"
    width: Count
    """Hidden units."""
    activation: ActivationName
    """g, on the gate branch only: sigmoid is GLU, gelu or gelu_tanh GEGLU, silu SwiGLU, relu ReGLU, identity
    the bilinear form."""
    bias_gate: Flag
    """Whether bg is there."""
    bias_up: Flag
    """Whether bu is there."""
    bias_down: Flag
    """Whether bd is there."""
    dropout: Dropout = 0.0
    """Share of hidden units, gate applied, dropped in training."""


class Experts(Frozen):
    """A router that sends each token to the ``top_k`` of ``n_experts`` feed-forward networks."""

    kind: Literal["experts"] = "experts"
    n_experts: Count
    """How many feed-forward networks there are."""
    top_k: Count
    """How many of them a token is sent to."""
    expert: Annotated[TwoLayer | Gated, Field(discriminator="kind")]
    """Each of the networks; they share their shape, not their parameters."""
    router_bias: Flag
    """Whether the router's scores have a bias."""
    router_order: Literal[
        "softmax_then_top_k",
        "softmax_then_top_k_renormalised",
        "top_k_then_softmax",
        "sigmoid_then_top_k",
        "sigmoid_then_top_k_renormalised",
    ]
    """How the top_k weights come about: softmax_then_top_k leaves a sum below one;
    softmax_then_top_k_renormalised and top_k_then_softmax are one function, with sum one; the sigmoid forms
    score every expert on its own."""
    router_scale: Positive = 1.0
    """Multiplies the weights."""
    load_balance: NonNegative = 0.0
    """Coefficient of the auxiliary load-balancing loss in training (Fedus et al. 2021)."""

    @model_validator(mode="after")
    def _enough(self) -> Experts:
        if self.top_k > self.n_experts:
            raise ValueError(f"top_k {self.top_k} exceeds n_experts {self.n_experts}")
        return self


FeedForward = Annotated[TwoLayer | Gated | Experts, Field(discriminator="kind")]
