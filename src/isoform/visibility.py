"""Who may read whom, as a value (R21–R24).

A `Visibility` is a rule between the places of a query side and a key side; rules combine with ``&``. A rule
becomes a matrix only when asked for one, and the matrix carries its truth direction in its type: `Allowed`
(True = may read), `Forbidden` (True = must not read), `Additive` (0 or -inf, added to the scores).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from isoform.errors import ShapeError
from isoform.masks import Additive, Allowed, Forbidden
from isoform.tokens import Layout, Tokens

__all__ = [
    "Additive",
    "Allowed",
    "Bidirectional",
    "Both",
    "Causal",
    "Cross",
    "Documents",
    "Forbidden",
    "Lowered",
    "Padding",
    "Places",
    "Prefix",
    "Visibility",
    "WaitK",
    "Window",
]


@dataclasses.dataclass(frozen=True, eq=False)
class Places:
    """Where the tokens of one side stand.

    Args:
        index: ``[B | 1, T]`` absolute place of each token in its row: how many real tokens precede it.
            Causal order compares these, so a cached step and a full pass follow the same rule.
        real: ``[B, T]`` True = a real token; None: all are.
        documents: ``[B, T]`` document numbers; None: one document a row.
        prefix: ``[B]`` how many leading tokens are the condition; None: none.
        layout: what is known about the padding without reading it.
    """

    index: Int[Tensor, "rows length"]
    real: Bool[Tensor, "batch length"] | None = None
    documents: Int[Tensor, "batch length"] | None = None
    prefix: Int[Tensor, " batch"] | None = None
    layout: Layout = "full"

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


class Visibility:
    """A rule that says which keys a query may read. Combine rules with ``&``: all of them must allow."""

    def __and__(self, other: Visibility) -> Visibility:
        return Both((*self.rules(), *other.rules()))

    def rules(self) -> tuple[Visibility, ...]:
        """The single rules this one is made of."""
        return (self,)

    def allows(self, query: Places, key: Places) -> Bool[Tensor, "rows query key"]:
        """The rule as booleans, True = may read, broadcastable to ``[B, T, S]``."""
        raise TypeError(f"{type(self).__name__} must define allows(query, key)")

    def on(self, query: Places | int, key: Places | int | None = None) -> Allowed:
        """The rule as a matrix. Integers stand for one row of that many real tokens; it prints as a grid."""
        query = Places.range(query) if isinstance(query, int) else query
        key = Places.range(key) if isinstance(key, int) else query if key is None else key
        matrix = self.allows(query, key)
        return Allowed(matrix.expand(matrix.shape[0], query.length, key.length))

    def mask_mod(self, query: Places, key: Places) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """The rule in FlexAttention's form: a function of (batch, head, query, key) indices, True = may read."""
        matrix = self.on(query, key).matrix
        rows = matrix.shape[0]

        def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return matrix[b if rows > 1 else b * 0, q, k]

        return rule

    def lower(self, query: Places, key: Places, *, reads_itself: bool = False) -> Lowered:
        """The cheapest form that attention kernels accept, equal to the matrix at every query.

        ``reads_itself`` says that every real query stands among the keys (a cached step), so that only
        padding can read nothing; self-attention over one set of places is known to.
        """
        return _lower(self, query, key, reads_itself or query is key)


@dataclasses.dataclass(frozen=True)
class Bidirectional(Visibility):
    """Every position reads every other (6.32)."""

    def allows(self, query: Places, key: Places) -> Bool[Tensor, "rows query key"]:
        return query.index.new_ones((1, query.length, key.length), dtype=torch.bool)


@dataclasses.dataclass(frozen=True)
class Cross(Visibility):
    """Every target position reads every source position; there is no triangle over the source (R21)."""

    def allows(self, query: Places, key: Places) -> Bool[Tensor, "rows query key"]:
        return query.index.new_ones((1, query.length, key.length), dtype=torch.bool)


@dataclasses.dataclass(frozen=True)
class Causal(Visibility):
    """A position reads itself and what precedes it, by absolute place (6.32)."""

    def allows(self, query: Places, key: Places) -> Bool[Tensor, "rows query key"]:
        return key.index[:, None, :] <= query.index[:, :, None]


@dataclasses.dataclass(frozen=True)
class Prefix(Visibility):
    """The condition reads all of itself, the rest reads what precedes it (6.33). Lengths are the places'."""

    def allows(self, query: Places, key: Places) -> Bool[Tensor, "rows query key"]:
        prefix = query.prefix if query.prefix is not None else key.prefix
        if prefix is None:
            raise ShapeError(
                "prefix visibility needs Tokens.prefix: how many leading tokens form the condition"
            )
        bound = prefix[:, None, None]
        both = (query.index[:, :, None] < bound) & (key.index[:, None, :] < bound)
        return both | (key.index[:, None, :] <= query.index[:, :, None])


@dataclasses.dataclass(frozen=True)
class Window(Visibility):
    """At most ``size`` positions, the query's own included: i - size < j, and j < i + size for "both" sides."""

    size: int
    sides: Literal["past", "both"]

    def allows(self, query: Places, key: Places) -> Bool[Tensor, "rows query key"]:
        back = query.index[:, :, None] - key.index[:, None, :]
        return back < self.size if self.sides == "past" else back.abs() < self.size


@dataclasses.dataclass(frozen=True)
class WaitK(Visibility):
    """A streaming source: target i (from 0) reads the first i + k source tokens (Ma et al. 2019)."""

    k: int

    def allows(self, query: Places, key: Places) -> Bool[Tensor, "rows query key"]:
        return key.index[:, None, :] < query.index[:, :, None] + self.k


@dataclasses.dataclass(frozen=True)
class Padding(Visibility):
    """Padding is not read, and reads nothing."""

    def allows(self, query: Places, key: Places) -> Bool[Tensor, "rows query key"]:
        matrix = query.index.new_ones((1, query.length, key.length), dtype=torch.bool)
        if key.real is not None:
            matrix = matrix & key.real[:, None, :]
        return matrix if query.real is None else matrix & query.real[:, :, None]


@dataclasses.dataclass(frozen=True)
class Documents(Visibility):
    """Packed documents do not see each other."""

    def allows(self, query: Places, key: Places) -> Bool[Tensor, "rows query key"]:
        if query.documents is None or key.documents is None:
            return query.index.new_ones((1, query.length, key.length), dtype=torch.bool)
        return query.documents[:, :, None] == key.documents[:, None, :]


@dataclasses.dataclass(frozen=True)
class Both(Visibility):
    """All of several rules."""

    parts: tuple[Visibility, ...]

    def rules(self) -> tuple[Visibility, ...]:
        return self.parts

    def allows(self, query: Places, key: Places) -> Bool[Tensor, "rows query key"]:
        matrix = self.parts[0].allows(query, key)
        for rule in self.parts[1:]:
            matrix = matrix & rule.allows(query, key)
        return matrix


@dataclasses.dataclass(frozen=True, eq=False)
class Lowered:
    """A visibility in the form kernels take.

    Args:
        mask: ``[B | 1, 1, T | 1, S]`` True = may read; None: nothing is forbidden beyond ``is_causal``.
        is_causal: the triangle over equal query and key places; only ever set where the rule is that triangle.
        dead: ``[B | 1, 1, T, 1]`` queries that read nothing and must yield zeros; None: there can be none.
    """

    mask: Bool[Tensor, "rows 1 query key"] | None
    is_causal: bool
    dead: Bool[Tensor, "rows 1 query 1"] | None

    def dense(self, length: int, device: torch.device) -> Bool[Tensor, "rows 1 query key"] | None:
        """The mask with the triangle written out; None when everything is allowed."""
        if not self.is_causal:
            return self.mask
        return torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]

    def additive(self, bias: Float[Tensor, "rows h query key"]) -> Float[Tensor, "rows h query key"]:
        """``bias`` where a query may read, the lowest finite number elsewhere (a dead row stays finite)."""
        mask = self.dense(bias.shape[-1], bias.device)
        if mask is None:
            return bias
        return torch.where(mask, bias, torch.finfo(bias.dtype).min)


# Rules under which a real position always reads at least itself.
_REFLEXIVE = (Bidirectional, Causal, Prefix, Window, Padding, Documents)


def _lower(rule: Visibility, query: Places, key: Places, reads_itself: bool) -> Lowered:
    ordered = query is key and query.layout in ("full", "right")
    rules = set(rule.rules())
    rules -= {r for r in rules if isinstance(r, Window) and ordered and r.size >= key.length}
    if query.documents is None or key.documents is None:
        rules.discard(Documents())
    plain = rules <= {Bidirectional(), Cross(), Padding()}
    padded = Padding() in rules
    if plain and padded:
        return Lowered(None if key.real is None else key.real[:, None, None, :], False, _dead(query, key))
    if plain:
        return Lowered(None, False, None)
    if ordered and Causal() in rules and rules <= {Bidirectional(), Causal(), Padding()}:
        # Right padding lies after every real query, so the triangle alone hides it; padded queries are dead.
        dead = None if query.real is None or not padded else ~query.real[:, None, :, None]
        return Lowered(None, True, dead)
    matrix = Both(tuple(rules)).allows(query, key)
    if matrix.shape[-2] != query.length or matrix.shape[-1] != key.length:
        matrix = matrix.expand(-1, query.length, key.length)
    if reads_itself and all(isinstance(r, _REFLEXIVE) for r in rules):
        return Lowered(matrix[:, None], False, None if query.real is None else ~query.real[:, None, :, None])
    return Lowered(matrix[:, None], False, ~matrix.any(-1)[:, None, :, None])


def _dead(query: Places, key: Places) -> Tensor | None:
    alive = None if key.real is None else key.real.any(-1)[:, None].expand(-1, query.length)
    if query.real is not None:
        alive = query.real if alive is None or query is key else alive & query.real
    return None if alive is None else ~alive[:, None, :, None]
