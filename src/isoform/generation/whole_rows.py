"""Forward passes that read whole rows at every step: `Uncached` a network, `Function` anything else."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from isoform.errors import ShapeError
from isoform.nn.cache import select_places
from isoform.nn.model import Transformer
from isoform.nn.stack import Memory
from isoform.tokens import Tokens
from isoform.visibility import Visibility


class Growing:
    """Prompts and what was chosen after them, whatever side the prompts are padded on."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens

    def append(self, chosen: Int[Tensor, " rows"]) -> None:
        """One more token a row. Behind right padding it leaves a gap, which no place counts."""
        t = self.tokens
        real = None if t.real is None else torch.cat([t.real, torch.ones_like(t.real[:, :1])], 1)
        layout = t.layout if t.layout in ("full", "left") else "any"
        self.tokens = Tokens(torch.cat([t.ids, chosen[:, None]], 1), real, prefix=t.prefix, layout=layout)

    def select(self, rows: Int[Tensor, " n"]) -> None:
        """The given rows."""
        self.tokens = self.tokens.select(rows)

    def last(self) -> Int[Tensor, " rows"]:
        """The column of each row's last real token."""
        if self.tokens.real is None:
            return torch.full_like(self.tokens.ids[:, 0], self.tokens.length - 1)
        columns = torch.arange(self.tokens.length, device=self.tokens.device)
        return torch.where(self.tokens.real, columns, 0).amax(-1)


class Uncached:
    """The whole row is read again at every step; the source is still encoded once (R20).

    Args:
        model: the network.
        visibility: another rule for the decoder; default: the configuration's.
        cross: another rule for reading the source; default: every real token.
    """

    def __init__(
        self, model: Transformer, *, visibility: Visibility | None = None, cross: Visibility | None = None
    ) -> None:
        self.model = model
        self._visibility, self._cross = visibility, cross

    def begin(
        self, tokens: Tokens, source: Tokens | None, max_new_tokens: int
    ) -> Float[Tensor, "batch vocab"]:
        """Encode the source and read the prompts."""
        return self.resume(Growing(tokens), None if source is None else self.model.encode(source))

    def resume(self, rows: Growing, memory: Memory | None) -> Float[Tensor, "rows vocab"]:
        """Go on from rows that were begun elsewhere."""
        self._rows, self._memory = rows, memory
        return self._logits()

    def step(self, chosen: Int[Tensor, " rows"]) -> Float[Tensor, "rows vocab"]:
        """Append and read all."""
        self._rows.append(chosen)
        return self._logits()

    def select(self, rows: Int[Tensor, " n"], *, same_sample: bool) -> None:
        """The given rows."""
        self._rows.select(rows)
        if self._memory is not None and not same_sample:
            self._memory = select_memory(self._memory, rows)

    def _logits(self) -> Tensor:
        hidden = self.model.hidden(
            self._rows.tokens, memory=self._memory, visibility=self._visibility, cross=self._cross
        )
        rows = torch.arange(hidden.shape[0], device=hidden.device)
        return head_of(self.model)(hidden[rows, self._rows.last()])


class Function:
    """Scores from a plain function of whole rows: forced scores, an ensemble, another library's model.

    Args:
        function: ``(tokens, source) -> [rows, V]``, the scores of the token after each row. New tokens
            stand in columns of their own behind the prompts, so a right-padded prompt has a gap before them.
    """

    def __init__(self, function: Callable[[Tokens, Tokens | None], Float[Tensor, "rows vocab"]]) -> None:
        self._function = function

    def begin(
        self, tokens: Tokens, source: Tokens | None, max_new_tokens: int
    ) -> Float[Tensor, "batch vocab"]:
        """Call the function on the prompts."""
        self._rows, self._source = Growing(tokens), source
        return self._function(self._rows.tokens, self._source)

    def step(self, chosen: Int[Tensor, " rows"]) -> Float[Tensor, "rows vocab"]:
        """Append and call the function on all."""
        self._rows.append(chosen)
        return self._function(self._rows.tokens, self._source)

    def select(self, rows: Int[Tensor, " n"], *, same_sample: bool) -> None:
        """The given rows of tokens and source."""
        self._rows.select(rows)
        if self._source is not None and not same_sample:
            self._source = self._source.select(rows)


def head_of(model: Transformer) -> torch.nn.Module:
    """What gives the scores.

    Raises:
        ShapeError: the network has none.
    """
    if model.head is None:
        raise ShapeError("the network has no head: it gives no scores to choose tokens from")
    return model.head


def select_memory(memory: Memory, rows: Int[Tensor, " n"]) -> Memory:
    """The given rows of an encoded source."""
    return Memory(memory.hidden.index_select(0, rows), select_places(memory.places, rows))
