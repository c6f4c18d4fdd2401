"""The run file's section on batches, and on masking for encoders."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from isoform.config.base import Frozen


class TokenBudget(Frozen):
    """Batches filled up to a number of padded tokens, both sides counted.

    Attributes:
        max_tokens: rows × (padded source + padded target) of a batch never exceeds it.
        pool: how many records are shuffled and then sorted by length together.
    """

    kind: Literal["tokens"] = "tokens"
    max_tokens: Annotated[int, Field(ge=1)]
    pool: Annotated[int, Field(ge=1)] = 65_536


class Windows(Frozen):
    """Windows of a stream: drawn at random with replacement to train, laid end to end to evaluate."""

    kind: Literal["windows"] = "windows"
    length: Annotated[int, Field(ge=1)]
    """Tokens a row."""
    batch_size: Annotated[int, Field(ge=1)]
    """Rows a batch."""


class Packed(Frozen):
    """Whole documents laid side by side in rows of ``length``, isolated from each other (R21)."""

    kind: Literal["packed"] = "packed"
    length: Annotated[int, Field(ge=1)]
    """Tokens a row."""
    batch_size: Annotated[int, Field(ge=1)]
    """Rows a batch."""


class Masking(Frozen):
    """Masked-token training (Devlin et al. 2019, §3.1): of the tokens, ``rate`` are to be predicted;
    of those ``masked`` become the mask token, ``random`` another token, the rest stay.

    ``token`` is the mask's name, one of the tokenizer's extra tokens.
    """

    rate: Annotated[float, Field(gt=0.0, le=1.0)] = 0.15
    """Share of the tokens that are to be predicted."""
    masked: Annotated[float, Field(ge=0.0, le=1.0)] = 0.8
    """Share of these that become the mask token."""
    random: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1
    """Share of these that become another token."""
    token: str = "<mask>"
    """Name of the mask token."""

    @model_validator(mode="after")
    def _consistent(self) -> Masking:
        if self.masked + self.random > 1 + 1e-9:
            raise ValueError("masked and random together exceed 1")
        return self


BatchingConfig = Annotated[TokenBudget | Windows | Packed, Field(discriminator="kind")]
