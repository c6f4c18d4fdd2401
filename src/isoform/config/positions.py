"""How a network knows the order of its tokens (R43): added to the embedding, or inside attention."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from isoform.config.base import Count, Flag, Frozen, Index, Positive


class NoPositions(Frozen):
    """Nothing is added, nothing rotates."""

    kind: Literal["none"] = "none"


# --- added to the embedding -------------------------------------------------------------------------------


class Sinusoidal(Frozen):
    """Fixed sines and cosines (Vaswani et al. 2017, section 3.5), with every disputed choice written out."""

    kind: Literal["sinusoidal"] = "sinusoidal"
    layout: Literal["interleaved", "concatenated"]
    """Whether sin and cos of one frequency stand next to each other (interleaved), or all sines before all
    cosines (concatenated)."""
    spacing: Literal["half_width", "half_width_minus_one"]
    """Frequency i is base^(-i/(d/2)) for half_width (the paper, Marian, Pegasus) and base^(-i/(d/2 - 1))
    for half_width_minus_one (tensor2tensor, fairseq, M2M100)."""
    offset: Index
    """Number of the first position."""
    base: Positive
    """The longest wavelength over 2π; 10000 in the paper."""
    precision: Literal["float32", "float64", "float64_to_float32"]
    """What the angles are computed in; float64_to_float32 rounds the finished table to float32."""


class Learned(Frozen):
    """A trained table of ``max_positions + offset`` rows; position p reads row p + offset."""

    kind: Literal["learned"] = "learned"
    max_positions: Count
    """The longest sequence the table serves."""
    offset: Index
    """Row of the first position: 0 in BERT and GPT-2, 2 in RoBERTa, OPT and BART."""


AddedPositions = Annotated[NoPositions | Sinusoidal | Learned, Field(discriminator="kind")]


# --- scaling of rotary frequencies ------------------------------------------------------------------------


class NoScaling(Frozen):
    """The frequencies as they are."""

    kind: Literal["none"] = "none"


class LinearScaling(Frozen):
    """Position interpolation (Chen et al. 2023)."""

    kind: Literal["linear"] = "linear"
    factor: Positive
    """Positions are divided by it."""


class DynamicNtkScaling(Frozen):
    """theta grows with the sequence once it is longer than ``original_length`` (dynamic NTK).

    The length is each row's own, so that a row's result does not depend on the batch it is in.
    """

    kind: Literal["dynamic_ntk"] = "dynamic_ntk"
    factor: Positive
    """f in theta · (f·length/original_length - (f - 1))^(width/(width - 2))."""
    original_length: Count
    """Up to this length the frequencies are the unscaled ones."""


class Llama3Scaling(Frozen):
    """Low frequencies divided by ``factor``, high ones kept, smooth between (Llama 3.1)."""

    kind: Literal["llama3"] = "llama3"
    factor: Positive
    """Divisor of the low frequencies."""
    low_frequency_factor: Positive
    """Wavelengths above original_length / low_frequency_factor are scaled in full."""
    high_frequency_factor: Positive
    """Wavelengths below original_length / high_frequency_factor are not scaled."""
    original_length: Count
    """Context length of the pre-training."""

    @model_validator(mode="after")
    def _ordered(self) -> Llama3Scaling:
        if self.low_frequency_factor >= self.high_frequency_factor:
            raise ValueError(
                f"low_frequency_factor {self.low_frequency_factor:g} must be below "
                f"high_frequency_factor {self.high_frequency_factor:g}"
            )
        return self


class YarnScaling(Frozen):
    """NTK by parts with a temperature on the rotated vectors (Peng et al. 2023)."""

    kind: Literal["yarn"] = "yarn"
    factor: Positive
    """Divisor of the interpolated frequencies."""
    original_length: Count
    """Context length of the pre-training."""
    beta_fast: Positive
    """Channels that turn more often within original_length are not interpolated; 32 in the paper."""
    beta_slow: Positive
    """Channels that turn less often than this are interpolated in full; 1 in the paper."""
    attention_factor: Positive
    """Multiplies cosines and sines; the paper's 0.1·ln(factor) + 1 has to be written out."""
    truncate: Flag
    """Whether the ends of the ramp between the two are rounded to whole channels."""


class LongRopeScaling(Frozen):
    """A divisor of each frequency, from one list or the other by the row's own length (Ding et al. 2024)."""

    kind: Literal["longrope"] = "longrope"
    short: tuple[Positive, ...]
    """Divisors, one a pair of channels, for rows up to original_length."""
    long: tuple[Positive, ...]
    """Divisors for longer rows."""
    original_length: Count
    """Context length of the pre-training."""
    attention_factor: Positive
    """Multiplies cosines and sines; the paper's sqrt(1 + ln(factor)/ln(original_length)) is written out."""


RotaryScaling = Annotated[
    NoScaling | LinearScaling | DynamicNtkScaling | Llama3Scaling | YarnScaling | LongRopeScaling,
    Field(discriminator="kind"),
]
BY_LENGTH = (DynamicNtkScaling, LongRopeScaling)
"""Scalings whose frequencies depend on how long a row is; both have an ``original_length``."""


# --- inside attention -------------------------------------------------------------------------------------


class Rotary(Frozen):
    """Rotary embedding of queries and keys (Su et al. 2021)."""

    kind: Literal["rotary"] = "rotary"
    layout: Literal["half", "interleaved"]
    """Which channels turn together: half pairs i with i + width/2 (NeoX, Llama in Hugging Face), interleaved
    2i with 2i + 1 (the paper, GPT-J, llama2.c)."""
    theta: Positive
    """Base of the frequencies theta^(-2i/width)."""
    width: Count
    """How many leading channels of a head rotate; the others pass."""
    scaling: RotaryScaling = NoScaling()
    """What is done to the frequencies for longer contexts."""
    precision: Literal["float32", "float64"]
    """What angles, sines and cosines are computed in."""

    @model_validator(mode="after")
    def _even(self) -> Rotary:
        if self.width % 2:
            raise ValueError(f"rotary width {self.width} must be even: channels rotate in pairs")
        if self.scaling.kind == "dynamic_ntk" and self.width == 2:
            raise ValueError("dynamic_ntk scaling needs a rotary width above 2: its exponent is w/(w - 2)")
        if isinstance(self.scaling, LongRopeScaling):
            pairs = self.width // 2
            for name, given in (("short", self.scaling.short), ("long", self.scaling.long)):
                if len(given) != pairs:
                    raise ValueError(
                        f"longrope scaling has {len(given)} {name} divisors for {pairs} pairs of channels"
                    )
        return self


class Alibi(Frozen):
    """-slope·|i - j| added to the scores (Press et al. 2021); slopes for any head count as in the paper."""

    kind: Literal["alibi"] = "alibi"
    factor: Positive = 1.0
    """Multiplies the bias; it is 1/sqrt(head width) where the bias is added before scaling (Falcon)."""
    rounding: Literal["none", "float32", "bfloat16"] = "none"
    """Other than none: the bias is slope·j for the key at place j, where slope, j and the product are each
    rounded to this type before factor applies (bfloat16 in Falcon, float32 in BLOOM as Hugging Face runs it
    in float64). Causal stacks only; unrounded, both forms give the same softmax there."""


class RelativeBuckets(Frozen):
    """A learned bias per head and distance bucket (Raffel et al. 2020), one table for the whole stack."""

    kind: Literal["relative_buckets"] = "relative_buckets"
    n_buckets: Count
    """Rows of the table."""
    max_distance: Count
    """Distances from here on share the last bucket."""
    bidirectional: Flag
    """Whether half of the buckets are for the future; else all are for the past."""

    @model_validator(mode="after")
    def _enough(self) -> RelativeBuckets:
        exact = (self.n_buckets // 2 if self.bidirectional else self.n_buckets) // 2
        if exact < 1 or self.max_distance <= exact:
            raise ValueError(
                f"relative_buckets: there are {exact} exact buckets; at least 1 is needed, "
                f"and max_distance {self.max_distance} must exceed them"
            )
        return self


AttentionPositions = Annotated[NoPositions | Rotary | Alibi | RelativeBuckets, Field(discriminator="kind")]
