"""Which attention and which feed-forward network of two models correspond: by weights, then by order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from isoform.verify.align import Inner, Model, Site, match_rows, rows_of, whole

SHARE = 0.3
"""Share of rows that two parts have in common if they are the same part, also where one has a fault."""

PartOf = TypeVar("PartOf", Site, Inner)


def pair(a: Model, b: Model) -> None:
    """Number B's parts like A's; those without a partner get numbers beyond.

    An attention of A whose partner in B is not seen as an attention (or the reverse) keeps its key too: so
    the stream is compared all the same.
    """
    sites_a, sites_b = a.structure.sites, b.structure.sites
    inners_a, inners_b = a.structure.inners, b.structure.inners
    _number(sites_a, sites_b, _same_site)
    _number(inners_a, inners_b, _same_inner)
    _number(a.structure.experts, b.structure.experts, _same_inner)
    unlike: dict[int, tuple[str, int]] = {}
    free_sites = [s for s in alone(sites_a, sites_b) if s.out is not None]
    for inner in alone(inners_b, inners_a):
        for site in free_sites:
            if site.out is not None and _columns(site.out.weight, inner.out.weight):
                unlike.setdefault(inner.out.out, ("site", site.index))
    for site in alone(sites_b, sites_a):
        for inner in alone(inners_a, inners_b):
            if site.out is not None and _columns(inner.out.weight, site.out.weight):
                unlike.setdefault(site.out.out, ("inner", inner.index))
    b.rename(unlike)


def pairs(a: Sequence[PartOf], b: Sequence[PartOf]) -> list[tuple[PartOf, PartOf]]:
    """Parts with the same number, in A's order."""
    by_index = {y.index: y for y in b}
    return [(x, by_index[x.index]) for x in a if x.index in by_index]


def alone(a: Sequence[PartOf], b: Sequence[PartOf]) -> list[PartOf]:
    """Parts of A without a partner in B."""
    taken = {y.index for y in b}
    return [x for x in a if x.index not in taken]


def _number(a: Sequence[PartOf], b: Sequence[PartOf], same: Callable[[PartOf, PartOf], bool]) -> None:
    partner: dict[int, int] = {}  # place in B → place in A
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if same(x, y):
            partner[i] = i
    for j, y in enumerate(b):
        if j not in partner:
            free = (i for i, x in enumerate(a) if i not in partner.values() and same(x, y))
            found = next(free, None)
            if found is not None:
                partner[j] = found
    if len(a) == len(b):  # weights that are nowhere in the other: the order has to do
        left = [i for i in range(len(a)) if i not in partner.values()]
        for j, i in zip((j for j in range(len(b)) if j not in partner), left, strict=True):
            partner[j] = i
    beyond = (a or b)[0].index + len(a) if a or b else 0
    for j, y in enumerate(b):
        if j in partner:
            y.index = a[partner[j]].index
        else:
            y.index, beyond = beyond, beyond + 1


def _same_site(a: Site, b: Site) -> bool:
    rows_a, rows_b = ([p for _, p in s.parts()] for s in (a, b))
    if rows_a and rows_b and _rows(rows_of(rows_a)[0], rows_of(rows_b)[0]):
        return True
    return a.out is not None and b.out is not None and _columns(a.out.weight, b.out.weight)


def _same_inner(a: Inner, b: Inner) -> bool:
    if _rows(rows_of(whole(a.sources))[0], rows_of(whole(b.sources))[0]):
        return True
    return _columns(a.out.weight, b.out.weight)


def _columns(a: Tensor, b: Tensor) -> bool:
    return _rows(a.t(), b.t())


def _rows(a: Tensor, b: Tensor) -> bool:
    if a.shape == b.shape and torch.equal(a, b):
        return True
    found = match_rows(a, b).index >= 0
    return bool(found.double().mean() >= SHARE)
