"""The parts a layer is configured from: normalisation, positions, attention, feed-forward.

A field has a default only where the default is the *absence* of an operation (no cap, no window, no
dropout, scale one). Whatever chooses between two functions of the same shape has to be written.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from isoform.config.base import Frozen

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
Dropout = Annotated[float, Field(ge=0.0, lt=1.0)]


class Norm(Frozen):
    """A normalisation over the feature axis (6.13–6.14, 6.18).

    ``gain_offset`` 1.0 multiplies by (1 + w) instead of w. ``gain_after_cast`` says what happens in half
    precision: the normalised value is rounded to the input's dtype before the gain multiplies it (Llama)
    or after (Gemma); in float32 and float64 the two are the same function.
    """

    kind: Literal["layer", "rms"]
    eps: NonNegativeFloat
    gain: bool = True
    bias: bool
    gain_offset: Literal[0.0, 1.0] = 0.0
    gain_after_cast: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> Norm:
        if self.kind == "rms" and self.bias:
            raise ValueError("an rms norm has a gain only; bias must be false")
        if not self.gain and (self.bias or self.gain_offset):
            raise ValueError("a norm without gain has neither bias nor gain_offset")
        return self


# --- positions added to the embedding ---------------------------------------------------------------------


class NoPositions(Frozen):
    """Nothing is added."""

    kind: Literal["none"] = "none"


class Sinusoidal(Frozen):
    """Fixed sines and cosines (Vaswani et al. 2017, section 3.5), with every disputed choice written out.

    ``layout``: "interleaved" puts sin and cos of one frequency next to each other, "concatenated" puts all
    sines before all cosines. ``spacing``: frequencies are base^(-i/(d/2)) for "half_width" and
    base^(-i/(d/2 - 1)) for "half_width_minus_one" (tensor2tensor, fairseq). ``offset`` is the number of the
    first position. ``precision`` is what the angles are computed in: "float64_to_float32" rounds the table.
    """

    kind: Literal["sinusoidal"] = "sinusoidal"
    layout: Literal["interleaved", "concatenated"]
    spacing: Literal["half_width", "half_width_minus_one"]
    offset: NonNegativeInt
    base: PositiveFloat
    precision: Literal["float32", "float64", "float64_to_float32"]


class Learned(Frozen):
    """A trained table. It has ``max_positions + offset`` rows; position p reads row p + offset."""

    kind: Literal["learned"] = "learned"
    max_positions: PositiveInt
    offset: NonNegativeInt


AddedPositions = Annotated[NoPositions | Sinusoidal | Learned, Field(discriminator="kind")]


# --- positions inside attention ---------------------------------------------------------------------------


class NoScaling(Frozen):
    """The frequencies as they are."""

    kind: Literal["none"] = "none"


class LinearScaling(Frozen):
    """Positions divided by ``factor`` (Chen et al. 2023, position interpolation)."""

    kind: Literal["linear"] = "linear"
    factor: PositiveFloat


class DynamicNtkScaling(Frozen):
    """theta grows with the sequence once it is longer than ``original_length`` (dynamic NTK).

    The length is each row's own, so that a row's result does not depend on the batch it is in.
    """

    kind: Literal["dynamic_ntk"] = "dynamic_ntk"
    factor: PositiveFloat
    original_length: PositiveInt


class Llama3Scaling(Frozen):
    """Low frequencies divided by ``factor``, high ones kept, smooth between (Llama 3.1)."""

    kind: Literal["llama3"] = "llama3"
    factor: PositiveFloat
    low_frequency_factor: PositiveFloat
    high_frequency_factor: PositiveFloat
    original_length: PositiveInt


class YarnScaling(Frozen):
    """NTK by parts with a temperature on the rotated vectors (Peng et al. 2023)."""

    kind: Literal["yarn"] = "yarn"
    factor: PositiveFloat
    original_length: PositiveInt
    beta_fast: PositiveFloat
    beta_slow: PositiveFloat
    attention_factor: PositiveFloat
    truncate: bool


RotaryScaling = Annotated[
    NoScaling | LinearScaling | DynamicNtkScaling | Llama3Scaling | YarnScaling, Field(discriminator="kind")
]


class Rotary(Frozen):
    """Rotary embedding of queries and keys (Su et al. 2021).

    ``layout``: "half" pairs channel i with i + width/2 (NeoX, Llama in Hugging Face), "interleaved" pairs 2i
    with 2i + 1 (the paper, GPT-J, llama2.c). Only the first ``width`` channels of a head rotate.
    ``precision`` is what angles, sines and cosines are computed in.
    """

    kind: Literal["rotary"] = "rotary"
    layout: Literal["half", "interleaved"]
    theta: PositiveFloat
    width: PositiveInt
    scaling: RotaryScaling = NoScaling()
    precision: Literal["float32", "float64"]

    @model_validator(mode="after")
    def _even(self) -> Rotary:
        if self.width % 2:
            raise ValueError(f"rotary width {self.width} must be even: channels rotate in pairs")
        return self


class Alibi(Frozen):
    """-slope·|i - j| added to the scores (Press et al. 2021); slopes for any number of heads as in the paper.

    ``factor`` multiplies the bias; it is 1/sqrt(head width) where the bias is added before scaling.
    """

    kind: Literal["alibi"] = "alibi"
    factor: PositiveFloat = 1.0


class RelativeBuckets(Frozen):
    """A learned bias per head and distance bucket (Raffel et al. 2020), one table for the whole stack.

    ``bidirectional`` halves the buckets between past and future.
    """

    kind: Literal["relative_buckets"] = "relative_buckets"
    n_buckets: PositiveInt
    max_distance: PositiveInt
    bidirectional: bool

    @model_validator(mode="after")
    def _enough(self) -> RelativeBuckets:
        exact = (self.n_buckets // 2 if self.bidirectional else self.n_buckets) // 2
        if exact < 1 or self.max_distance <= exact:
            raise ValueError(
                f"relative_buckets: max_distance {self.max_distance} must exceed the {exact} exact buckets, and be ≥ 1"
            )
        return self


AttentionPositions = Annotated[NoPositions | Rotary | Alibi | RelativeBuckets, Field(discriminator="kind")]


# --- attention --------------------------------------------------------------------------------------------


class AttentionBias(Frozen):
    """Which of the four projections have a bias."""

    query: bool
    key: bool
    value: bool
    output: bool


class QKNorm(Frozen):
    """Normalisation of queries and keys: per head, or over the whole projection; before or after rotation."""

    norm: Norm
    axis: Literal["head", "projection"]
    order: Literal["before_rotation", "after_rotation"]


class Attention(Frozen):
    """Multi-head, grouped-query or multi-query attention (6.1–6.2, R42).

    ``scale`` multiplies the scores: a number, or "inverse_sqrt_head_width". ``window`` is how many
    positions a query reads, itself included: i - window < j ≤ i, and both sides |i - j| < window where the
    visibility is bidirectional. ``softcap`` c replaces scores by c·tanh(scores/c), before the mask.
    """

    n_heads: PositiveInt
    n_kv_heads: PositiveInt
    head_width: PositiveInt
    scale: PositiveFloat | Literal["inverse_sqrt_head_width"]
    bias: AttentionBias
    positions: AttentionPositions
    qk_norm: QKNorm | None = None
    softcap: PositiveFloat | None = None
    window: PositiveInt | None = None
    dropout: Dropout = 0.0

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


# --- feed-forward -----------------------------------------------------------------------------------------


class TwoLayer(Frozen):
    """phi(x W1 + b1) W2 + b2 (6.3)."""

    kind: Literal["two_layer"] = "two_layer"
    width: PositiveInt
    activation: ActivationName
    bias_up: bool
    bias_down: bool
    dropout: Dropout = 0.0


class Gated(Frozen):
    """[g(x Wg) * (x Wu)] Wd (6.9). ``activation`` is g, on the gate branch only: sigmoid is GLU, gelu or
    gelu_tanh GEGLU, silu SwiGLU, relu ReGLU, identity the bilinear form."""

    kind: Literal["gated"] = "gated"
    width: PositiveInt
    activation: ActivationName
    bias_gate: bool
    bias_up: bool
    bias_down: bool
    dropout: Dropout = 0.0


class Experts(Frozen):
    """A router that sends each token to the ``top_k`` of ``n_experts`` feed-forward networks.

    ``router_order`` names how the k weights come about: "softmax_then_top_k" (sum below one),
    "softmax_then_top_k_renormalised" and "top_k_then_softmax" (the same function, sum one),
    "sigmoid_then_top_k", "sigmoid_then_top_k_renormalised". ``router_scale`` multiplies the weights.
    ``load_balance`` is the coefficient of the auxiliary loss in training (Fedus et al. 2021).
    """

    kind: Literal["experts"] = "experts"
    n_experts: PositiveInt
    top_k: PositiveInt
    expert: Annotated[TwoLayer | Gated, Field(discriminator="kind")]
    router_bias: bool
    router_order: Literal[
        "softmax_then_top_k",
        "softmax_then_top_k_renormalised",
        "top_k_then_softmax",
        "sigmoid_then_top_k",
        "sigmoid_then_top_k_renormalised",
    ]
    router_scale: PositiveFloat = 1.0
    load_balance: NonNegativeFloat = 0.0

    @model_validator(mode="after")
    def _enough(self) -> Experts:
        if self.top_k > self.n_experts:
            raise ValueError(f"top_k {self.top_k} exceeds n_experts {self.n_experts}")
        return self


FeedForward = Annotated[TwoLayer | Gated | Experts, Field(discriminator="kind")]
