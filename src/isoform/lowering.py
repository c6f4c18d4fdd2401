"""A visibility in the forms attention kernels take. Each form is built when first asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from jaxtyping import Bool
from torch import Tensor

from isoform.places import Places, Spots
from isoform.visibility import (
    Bidirectional,
    Both,
    Causal,
    Cross,
    Documents,
    Padding,
    Prefix,
    Visibility,
    Window,
)

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

T = TypeVar("T")

# Rules under which a real position always reads at least itself.
_REFLEXIVE = (Bidirectional, Causal, Prefix, Window, Padding, Documents)


@dataclasses.dataclass(frozen=True, eq=False)
class Lowered:
    """A visibility, ready for kernels; `lower` makes it.

    Args:
        rule: the whole rule.
        query: where the queries stand.
        key: where the keys stand.
        is_causal: the triangle over equal query and key places; only ever set where, for every real query,
            the rule is that triangle (R22).
        left: what a mask has to say beyond ``is_causal``, for real queries; None: nothing.
        reflexive: every real query reads itself, so that only padding can read nothing.
    """

    rule: Visibility
    query: Places
    key: Places
    is_causal: bool
    left: Visibility | None
    reflexive: bool
    _built: dict[str, object] = dataclasses.field(default_factory=dict, init=False, repr=False)

    @property
    def mask(self) -> Bool[Tensor, "rows 1 query key"] | None:
        """``[B | 1, 1, T | 1, S | 1]`` True = may read; None: nothing is forbidden beyond ``is_causal``.

        Rows of padded queries are whatever is cheapest: `alive` zeroes what they read.
        """
        return self._once("mask", self._mask)

    @property
    def alive(self) -> Bool[Tensor, "rows 1 query 1"] | None:
        """``[B | 1, 1, T | 1, 1]`` False: a query that reads nothing, to yield zeros (R4); None: all read."""
        return self._once("alive", self._alive)

    @property
    def written_out(self) -> Bool[Tensor, "rows 1 query key"] | None:
        """`mask` with the triangle of ``is_causal`` written out; None when everything is allowed."""
        return self._once("written_out", self._triangle) if self.is_causal else self.mask

    @property
    def by_pair(self) -> bool:
        """Whether `mask` differs from query to query, so that written out it has T·S elements a row."""
        return self.left is not None and any(not isinstance(r, _RealKeys) for r in self.left.rules())

    def block_mask(self, batch: int) -> BlockMask:
        """FlexAttention's form of the whole rule. No matrix of single places is kept."""
        return self._once("block_mask", lambda: self._blocks(batch))

    def _once(self, name: str, build: Callable[[], T]) -> T:
        # A dict, not functools.cached_property: its lock cannot be traced before Python 3.12.
        if name not in self._built:
            self._built[name] = build()
        return self._built[name]  # pyright: ignore[reportReturnType]

    def _mask(self) -> Tensor | None:
        if self.left is None:
            return None
        found = self.left.reads(self.query.down(), self.key.across())
        return None if found is True else found[:, None]

    def _alive(self) -> Tensor | None:
        padding = any(isinstance(r, Padding) for r in self.rule.rules())
        mine = self.query.real[:, None, :, None] if padding and self.query.real is not None else None
        mask = None if self.reflexive else self.mask
        if mask is None:
            return mine
        some = mask.any(-1, keepdim=True)
        return some if mine is None else some & mine

    def _triangle(self) -> Tensor:
        shape = (self.query.length, self.key.length)
        return torch.ones(shape, dtype=torch.bool, device=self.key.index.device).tril()[None, None]

    def _blocks(self, batch: int) -> BlockMask:
        from torch.nn.attention.flex_attention import create_block_mask

        query, key = self.query, self.key
        alike = query.rows() is None and key.rows() is None
        make = create_block_mask
        if key.index.is_cuda and not torch.compiler.is_compiling():
            make = torch.compile(create_block_mask)  # so that the matrix it looks at is never stored
        return make(
            self.rule.mask_mod(query, key),
            None if alike else batch,
            None,
            query.length,
            key.length,
            device=key.index.device.type,
        )


@dataclasses.dataclass(frozen=True)
class _RealKeys(Visibility):
    """Padding is not read. What padded queries read is left to `Lowered.alive`."""

    def reads(self, query: Spots, key: Spots) -> Tensor | Literal[True]:
        return True if key.real is None else key.real


def lower(rule: Visibility, query: Places, key: Places, reads_itself: bool) -> Lowered:
    """Find what of a rule a mask has to say. See `Visibility.lower`."""
    ordered = query is key and query.ordered
    reflexive = reads_itself and all(_reads_itself(r) for r in rule.rules())
    # Rules are told apart by class: instances made while compiling cannot be compared.
    left = [r for r in rule.rules() if not _says_nothing(r, query, key, ordered)]
    if reads_itself and key.ordered and any(isinstance(r, Causal) for r in left):
        # Padded and unwritten slots lie behind every real query, so the triangle alone hides them.
        left = [r for r in left if not isinstance(r, Padding)]
    is_causal = ordered and len(left) > 0 and all(isinstance(r, Causal) for r in left)
    left = [] if is_causal else [_RealKeys() if isinstance(r, Padding) else r for r in left]
    return Lowered(rule, query, key, is_causal, Both(tuple(left)) if left else None, reflexive)


def _reads_itself(rule: Visibility) -> bool:
    # A window of none does not hold the query either.
    return isinstance(rule, _REFLEXIVE) and not (isinstance(rule, Window) and rule.size < 1)


def _last(query: Places, key: Places) -> bool:
    """Whether the only query of each row stands at the last key, with every key there."""
    if query.start is None or key.start is None or query.length != 1:
        return False
    return query.start == key.start + key.length - 1


def _says_nothing(rule: Visibility, query: Places, key: Places, ordered: bool) -> bool:
    if isinstance(rule, Documents):
        return query.documents is None or key.documents is None
    if isinstance(rule, Padding):
        return key.real is None
    if isinstance(rule, Causal | Prefix) and _last(query, key):
        return True
    if isinstance(rule, Window):
        return (ordered or _last(query, key)) and rule.size >= key.length
    return isinstance(rule, Bidirectional | Cross)
