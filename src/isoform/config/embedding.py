"""From token ids to the first hidden state."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from isoform.config.base import Count, Dropout, Flag, Frozen, Index, Positive
from isoform.config.parts import Norm
from isoform.config.positions import AddedPositions


class Projection(Frozen):
    """A linear map from the table's width to d_model."""

    place: Literal["before_positions", "after_norm"]
    """Where it stands. With before_positions, positions, token types and norm have d_model channels (OPT);
    with after_norm they have the table's width, and the map comes after the dropout (ALBERT, ELECTRA)."""
    bias: Flag
    """Whether the map has a bias."""


class Embedding(Frozen):
    """From token ids to the first hidden state.

    Order: lookup × scale → [projection before_positions] → + positions + token types → norm → dropout →
    [projection after_norm].
    """

    vocabulary: Annotated[str, Field(min_length=1)]
    """Name of the token ids the rows stand for. Two tables may be shared only when they name the same one,
    which is more than having the same size (R27)."""
    vocab_size: Count
    """Rows of the table."""
    width: Count
    """Columns of the table."""
    projection: Projection | None = None
    """From width to d_model; needed where they differ, possible where they agree (ALBERT always has one)."""
    scale: Positive | Literal["sqrt_d_model"] = 1.0
    """Multiplies the looked-up rows: a number, or sqrt_d_model."""
    positions: AddedPositions
    """What is added for the position."""
    n_token_types: Index = 0
    """Rows of the token-type (segment) table; 0: there is none."""
    norm: Norm | None = None
    """Norm of the sum."""
    dropout: Dropout = 0.0
    """Share of the normalised sum dropped in training."""

    def inner_width(self, d_model: int) -> int:
        """Channels that positions, token types and norm have."""
        return self.width if self.projection and self.projection.place == "after_norm" else d_model
