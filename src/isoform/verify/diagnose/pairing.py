"""Which attention and which feed-forward network of two models correspond: by weights, then by order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from isoform.verify.align import Inner, Key, Linear, Model, Site
from isoform.verify.rows import match_rows, rows_of

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
    for one, two in pairs(sites_a, sites_b):  # one that reads its own stream in one of the models only
        one.cross = two.cross = one.cross or two.cross
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
    _demote(a, b)
    _demote(b, a)
    if order(b, a) == sorted(order(b, a)):
        _realign(a, b)


def order(model: Model, other: Model) -> list[tuple[str, bool, int]]:
    """Numbers of the parts that both have, by stream, in the order in which they are run."""
    ends: list[tuple[str, int, Linear | None]] = []
    for kind, own, theirs in (
        ("inner", model.structure.inners, other.structure.inners),
        ("site", model.structure.sites, other.structure.sites),
    ):
        both = {x.index for x in theirs}
        ends += [(kind, x.index, x.out) for x in own if x.index in both]
    found = [(kind, out is not None and model.role(out.out) == "target", index) for kind, index, out in ends]
    return sorted(found, key=lambda x: x[:2])


def _demote(model: Model, other: Model) -> None:
    """Where a residual sum is lost, the next map looks like the second one of a feed-forward network."""
    structure = other.structure
    ends = {inner.out for inner in structure.inners} | {site.out for site in structure.sites}
    maps = [linear for linear in structure.linears if linear not in ends]
    found = [
        inner
        for inner in alone(model.structure.inners, structure.inners)
        if any(_rows(linear.weight, inner.out.weight) for linear in maps)
    ]
    for inner in found:
        model.structure.demote(inner)
    if found:
        model.rename({})


def _realign(a: Model, b: Model) -> None:
    """Sums that hold other contributions in the two models correspond by the last one that is added.

    So a contribution that is lost, or one too many, doesn't keep what comes after it from being compared:
    each part is fed with the other model's values.
    """
    for one, two in ((a, b), (b, a)):
        for key, node in list(one.states.items()):
            if key in two.states or node not in one.structure.sums:
                continue
            out = two.sources_at(_last(one, node))
            if out is not None and any(
                two.structure.tops(n) == [out] for n, _ in two.structure.reads.values()
            ):
                two.alias(out, key)
    for node in [n for n in b.structure.states if b.state_key(n) not in a.states]:
        if b.state_key(node) in a.states:
            continue
        last = _last(b, node)
        same = (k for k, n in a.states.items() if n in a.structure.states and _last(a, n) == last)
        found = next((k for k in same if k not in b.states), None)
        if last is not None and found is not None:
            b.alias(node, found)


def _last(model: Model, state: int) -> Key | None:
    """The latest contribution of a sum, among those it adds itself."""
    if state in model.structure.by_out:
        return None
    tops = {t for arg in model.graph.live_args(state) for t in model.structure.tops(arg)}
    own = [t for t in tops if t in model.sources and t not in model.structure.entries]
    return model.sources[max(own)] if own else None


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
    if _rows(rows_of(a.parts)[0], rows_of(b.parts)[0]):
        return True
    return _columns(a.out.weight, b.out.weight)


def _columns(a: Tensor, b: Tensor) -> bool:
    return _rows(a.t(), b.t())


def _rows(a: Tensor, b: Tensor) -> bool:
    if a.shape == b.shape and torch.equal(a, b):
        return True
    found = match_rows(a, b).index >= 0
    return bool(found.double().mean() >= SHARE)
