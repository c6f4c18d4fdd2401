"""Where the tokens of one side stand: what visibility rules compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from isoform.tokens import Layout, Tokens


@dataclasses.dataclass(frozen=True, eq=False)
class Spots:
    """Some places, in shapes that broadcast against those of the other side.

    ``index`` is the place in the row, ``real`` whether a token is there (None: always), ``documents`` its
    document (None: one a row), ``prefix`` the length of its row's condition (None: none).
    """

    index: Tensor
    real: Tensor | None
    documents: Tensor | None
    prefix: Tensor | None


@dataclasses.dataclass(frozen=True, eq=False)
class Places:
    """Where the tokens of one side stand.

    Args:
        index: ``[B | 1, T]`` absolute place of each token in its row: how many real tokens precede it.
            Causal order compares these, so a cached step and a full pass follow the same rule.
        real: ``[B, T]`` True = a real token; None: all are.
        documents: ``[B, T]`` document numbers; None: one document a row.
        prefix: ``[B | 1]`` how many leading tokens are the condition; None: none.
        layout: what is known about the padding without reading it.
        start: the place of every row's first token, where that is one number known on the host, and all
            tokens are real and count on from it; None: unknown.
    """

    index: Int[Tensor, "rows length"]
    real: Bool[Tensor, "batch length"] | None = None
    documents: Int[Tensor, "batch length"] | None = None
    prefix: Int[Tensor, " batch"] | None = None
    layout: Layout = "full"
    start: int | None = None

    @classmethod
    def of(cls, tokens: Tokens) -> Places:
        """The places of a batch of tokens."""
        shared = tokens.layout in ("full", "right")  # every row counts 0, 1, 2 … where it is real
        index = torch.arange(tokens.length, device=tokens.device)[None] if shared else tokens.places()
        return cls(index, tokens.real, tokens.documents, tokens.prefix, tokens.layout or "any")

    @classmethod
    def range(cls, length: int, *, prefix: int | None = None) -> Places:
        """One row of ``length`` real tokens."""
        return cls(torch.arange(length)[None], prefix=None if prefix is None else torch.tensor([prefix]))

    @property
    def length(self) -> int:
        """Number of places T."""
        return self.index.shape[-1]

    @property
    def ordered(self) -> bool:
        """Whether every row counts 0, 1, 2 … from its first slot, with what padding there is behind."""
        return self.layout in ("full", "right")

    def down(self) -> Spots:
        """All places as queries: ``[rows, T, 1]``."""
        return self._spots(lambda x: x[:, :, None], lambda row: row[:, None, None])

    def across(self) -> Spots:
        """All places as keys: ``[rows, 1, T]``."""
        return self._spots(lambda x: x[:, None, :], lambda row: row[:, None, None])

    def at(self, b: Tensor, t: Tensor) -> Spots:
        """The place t of row b."""

        def row(x: Tensor) -> Tensor:
            return b if x.shape[0] > 1 else b * 0

        return self._spots(lambda x: x[row(x), t], lambda x: x[row(x)])

    def rows(self) -> int | None:
        """How many rows differ; None where all are alike."""
        named = (self.index, self.real, self.documents, self.prefix)
        rows = max(x.shape[0] for x in named if x is not None)
        return rows if rows > 1 else None

    def _spots(self, place: Callable[[Tensor], Tensor], row: Callable[[Tensor], Tensor]) -> Spots:
        return Spots(
            place(self.index),
            None if self.real is None else place(self.real),
            None if self.documents is None else place(self.documents),
            None if self.prefix is None else row(self.prefix),
        )
