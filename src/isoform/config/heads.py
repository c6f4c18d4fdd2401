"""What is read off the last hidden states."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from isoform.config.base import Count, Dropout, Flag, Frozen, Nullable, Positive
from isoform.config.parts import ActivationName, Norm


class Transform(Frozen):
    """A layer in front of the output matrix: norm(activation(h W + b)), from d_model to the table's width."""

    activation: ActivationName
    """Its non-linearity; identity for a mere projection (OPT 350M)."""
    bias: Flag
    """Whether b is there."""
    norm: Nullable[Norm]
    """The norm after it, or none."""


class TokenHead(Frozen):
    """Scores over the vocabulary: (transform(h) · scale) Eᵀ + b, then c·tanh(z/c) with ``softcap`` c.

    E has as many columns as there are channels before it: the table's width behind a transform, else d_model.
    """

    kind: Literal["tokens"] = "tokens"
    tied: Flag
    """Whether E is the embedding table of the same stream (6.36)."""
    bias: Flag
    """Whether b is there."""
    transform: Transform | None = None
    """A layer before the output matrix (BERT, ELECTRA, OPT 350M)."""
    scale: Positive | Literal["inverse_sqrt_d_model"] = 1.0
    """Multiplies the state before the output matrix: a number, or inverse_sqrt_d_model (tied T5)."""
    softcap: Positive | None = None
    """c of the cap on the scores (Gemma 2)."""


class Pooler(Frozen):
    """A dense layer d_model → d_model with an activation."""

    activation: ActivationName
    """Its non-linearity."""
    bias: Flag
    """Whether it has a bias."""


class SequenceHead(Frozen):
    """One decision a sequence: pool → input dropout → [pooler] → dropout → scores over the labels."""

    kind: Literal["sequence_labels"] = "sequence_labels"
    n_labels: Count
    """How many labels there are."""
    pooling: Literal["mean", "first", "last"]
    """Which real tokens make the vector: the mean of all, the first or the last one."""
    input_dropout: Dropout = 0.0
    """Share of the pooled vector dropped in training (RoBERTa, ELECTRA)."""
    pooler: Nullable[Pooler]
    """A dense layer on the pooled vector, or none."""
    bias: Flag
    """Whether the scores have a bias."""
    dropout: Dropout = 0.0
    """Share dropped in training in front of the scores."""


class TaggingHead(Frozen):
    """One decision a token: [dense] → dropout → scores over the labels."""

    kind: Literal["token_labels"] = "token_labels"
    n_labels: Count
    """How many labels there are; ELECTRA's discriminator has one."""
    dense: Pooler | None = None
    """A dense layer on each state."""
    bias: Flag
    """Whether the scores have a bias."""
    dropout: Dropout = 0.0
    """Share dropped in training in front of the scores."""


class PoolingHead(Frozen):
    """One vector a sequence."""

    kind: Literal["pooled"] = "pooled"
    pooling: Literal["mean", "first", "last"]
    """Which real tokens make the vector: the mean of all, the first or the last one."""
    pooler: Nullable[Pooler]
    """A dense layer on the pooled vector, or none."""
    normalise: Flag
    """Whether the vector is divided by its Euclidean norm."""


Head = Annotated[TokenHead | SequenceHead | TaggingHead | PoolingHead, Field(discriminator="kind")]
