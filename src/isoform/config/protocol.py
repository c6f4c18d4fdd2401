"""The token protocol that goes with a network: what is put around texts, what starts and ends an output.

It is no part of the function the network computes, and just as easily got wrong; so it is data too, and is
stored in the artifact beside the architecture (R37).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from isoform.config.base import Frozen

TokenId = Annotated[int, Field(ge=0)]


class Protocol(Frozen):
    """Which special ids are used where."""

    pad_id: TokenId
    """Fills ragged batches; never an id that means something (in particular not EOS)."""
    eos_ids: tuple[TokenId, ...]
    """Ids that end an output; they are not part of the text."""
    start: tuple[TokenId, ...] = ()
    """Ids that the decoder begins with: an encoder–decoder's start token, or BOS before a prompt."""
    end_supervised: bool = True
    """Whether training targets end in the first of eos_ids (Algorithm 6.1)."""
    source_prefix: tuple[TokenId, ...] = ()
    """Ids put before a source text (an encoder's input included)."""
    source_suffix: tuple[TokenId, ...] = ()
    """Ids put after it."""
    forced: tuple[tuple[TokenId, TokenId], ...] = ()
    """(step, id) pairs: at that step of the output, counted from 0, only that id may be chosen."""
    forced_last: TokenId | None = None
    """The only id that the last token of an output which runs into the length limit may be."""
    suppressed: tuple[TokenId, ...] = ()
    """Ids that are never chosen."""
    padding_side: Literal["right", "left"] = "right"
    """Where batches are padded by default; results do not depend on it."""

    @model_validator(mode="after")
    def _pad_means_nothing(self) -> Protocol:
        if self.pad_id in self.eos_ids:
            raise ValueError(f"pad_id {self.pad_id} is also an eos id: every end would be taken for padding")
        return self
