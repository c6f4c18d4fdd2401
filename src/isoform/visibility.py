"""Who may read whom, as a value (R21–R24).

A `Visibility` is a rule between the places of a query side and a key side; rules combine with ``&``. A rule
becomes a matrix only when asked for one, and the matrix carries its truth direction in its type: `Allowed`
(True = may read), `Forbidden` (True = must not read), `Additive` (0 or -inf, added to the scores).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from isoform.errors import ShapeError
from isoform.masks import Additive, Allowed, Forbidden
from isoform.places import Places, Spots

if TYPE_CHECKING:
    from isoform.lowering import Lowered

__all__ = [
    "Additive",
    "Allowed",
    "Bidirectional",
    "Both",
    "Causal",
    "Cross",
    "Documents",
    "Forbidden",
    "Padding",
    "Places",
    "Prefix",
    "Spots",
    "Visibility",
    "WaitK",
    "Window",
]


class Visibility:
    """A rule that says which keys a query may read. Combine rules with ``&``: all of them must allow."""

    def __and__(self, other: Visibility) -> Visibility:
        if not isinstance(other, Visibility):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"{type(self).__name__} & {type(other).__name__}: rules combine with rules")
        return Both((*self.rules(), *other.rules()))

    def rules(self) -> tuple[Visibility, ...]:
        """The single rules this one is made of."""
        return (self,)

    def reads(self, query: Spots, key: Spots) -> Tensor | Literal[True]:
        """Whether the query may read the key, element by element; plain True: always. What a rule defines."""
        raise TypeError(f"{type(self).__name__} must define reads(query, key)")

    def allows(self, query: Places, key: Places) -> Bool[Tensor, "rows query key"]:
        """The rule as booleans, True = may read."""
        found = self.reads(query.down(), key.across())
        matrix = torch.ones(1, 1, 1, dtype=torch.bool, device=key.index.device) if found is True else found
        return matrix.expand(-1, query.length, key.length)

    def on(self, query: Places | int, key: Places | int | None = None) -> Allowed:
        """The rule as a matrix. Integers stand for one row of that many real tokens; it prints as a grid."""
        query = Places.range(query) if isinstance(query, int) else query
        key = Places.range(key) if isinstance(key, int) else query if key is None else key
        return Allowed(self.allows(query, key))

    def mask_mod(self, query: Places, key: Places) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """The rule in FlexAttention's form: of (batch, head, query, key) indices, True = may read."""

        def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            found = self.reads(query.at(b, q), key.at(b, k))
            return q >= 0 if found is True else found

        return rule

    def lower(self, query: Places, key: Places, *, reads_itself: bool = False) -> Lowered:
        """The cheapest forms that attention kernels accept, equal to the rule at every query.

        ``reads_itself`` says that every real query stands among the keys (a cached step), so that only
        padding can read nothing; self-attention over one set of places is known to.
        """
        from isoform.lowering import lower

        return lower(self, query, key, reads_itself or query is key)


@dataclasses.dataclass(frozen=True)
class Bidirectional(Visibility):
    """Every position reads every other (6.32)."""

    def reads(self, query: Spots, key: Spots) -> Tensor | Literal[True]:
        return True


@dataclasses.dataclass(frozen=True)
class Cross(Visibility):
    """Every target position reads every source position; there is no triangle over the source (R21)."""

    def reads(self, query: Spots, key: Spots) -> Tensor | Literal[True]:
        return True


@dataclasses.dataclass(frozen=True)
class Causal(Visibility):
    """A position reads itself and what precedes it, by absolute place (6.32)."""

    def reads(self, query: Spots, key: Spots) -> Tensor:
        return key.index <= query.index


@dataclasses.dataclass(frozen=True)
class Prefix(Visibility):
    """The condition reads all of itself, the rest reads what precedes it (6.33). Lengths are the places'."""

    def reads(self, query: Spots, key: Spots) -> Tensor:
        prefix = query.prefix if query.prefix is not None else key.prefix
        if prefix is None:
            raise ShapeError(
                "prefix visibility needs Tokens.prefix: how many leading tokens form the condition"
            )
        return ((query.index < prefix) & (key.index < prefix)) | (key.index <= query.index)


@dataclasses.dataclass(frozen=True)
class Window(Visibility):
    """At most ``size`` positions, the query's own included: i - size < j, for "both" sides j < i + size."""

    size: int
    sides: Literal["past", "both"]

    def reads(self, query: Spots, key: Spots) -> Tensor:
        back = query.index - key.index
        return back < self.size if self.sides == "past" else back.abs() < self.size


@dataclasses.dataclass(frozen=True)
class WaitK(Visibility):
    """A streaming source: target i (from 0) reads the first i + k source tokens (Ma et al. 2019)."""

    k: int

    def reads(self, query: Spots, key: Spots) -> Tensor:
        return key.index < query.index + self.k


@dataclasses.dataclass(frozen=True)
class Padding(Visibility):
    """Padding is not read, and reads nothing."""

    def reads(self, query: Spots, key: Spots) -> Tensor | Literal[True]:
        if query.real is None or key.real is None:
            found = key.real if query.real is None else query.real
            return True if found is None else found
        return query.real & key.real


@dataclasses.dataclass(frozen=True)
class Documents(Visibility):
    """Packed documents do not see each other."""

    def reads(self, query: Spots, key: Spots) -> Tensor | Literal[True]:
        if query.documents is None or key.documents is None:
            return True
        return query.documents == key.documents


@dataclasses.dataclass(frozen=True)
class Both(Visibility):
    """All of several rules."""

    parts: tuple[Visibility, ...]

    def rules(self) -> tuple[Visibility, ...]:
        return self.parts

    def reads(self, query: Spots, key: Spots) -> Tensor | Literal[True]:
        found: Tensor | Literal[True] = True
        for rule in self.parts:
            more = rule.reads(query, key)
            found = more if found is True else found if more is True else found & more
        return found
