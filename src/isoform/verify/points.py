"""Points that two models have in common, wherever their code puts them."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from isoform.verify.align import Model, Part
from isoform.verify.rows import match_rows, whole


@dataclasses.dataclass(eq=False)
class Point:
    """One value that two models have in common.

    Attributes:
        name: what it is.
        node_a, node_b: the operations that give it.
        width_a, width_b: their features.
        columns: which features of the candidate, in the reference's order; None: all.
        columns_a: which of the reference, where its operation gives more.
    """

    name: str
    node_a: int
    node_b: int
    width_a: int
    width_b: int
    columns: Tensor | None = None
    columns_a: Tensor | None = None


def points(a: Model, b: Model) -> list[Point]:
    """Points that both models have, in the reference's order."""
    ends = a.graph.output, b.graph.output
    # First, so that its name stays where the result is the output of a part, as an encoder's states are.
    found = [Point("result", *ends, a.width(ends[0]), b.width(ends[1]))]
    for key, node in a.states.items():
        other = b.states.get(key)
        if other is not None:
            name = "token vectors" if node in a.structure.entries else "sum of the stream"
            width = a.graph.values[node].shape[-1]
            found.append(Point(name, node, other, width, b.graph.values[other].shape[-1]))
            ta, tb = a.structure.trunk.get(node, node), b.structure.trunk.get(other, other)
            if ta != node or tb != other:
                found.append(Point("stream", ta, tb, width, width))
    for key, node in a.reads.items():
        other = b.reads.get(key)
        if other is not None:
            width = a.graph.values[node].shape[-1]
            what = {"site": "input of attention", "inner": "input of feed-forward"}.get(
                str(key[0]), "end of the stack"
            )
            found.append(Point(what, node, other, width, b.graph.values[other].shape[-1]))
    for x, y in zip(a.structure.sites, b.structure.sites, strict=False):
        kind = "cross-attention" if x.cross else "self-attention"
        for name, pa, pb in (("queries", x.q, y.q), ("keys", x.k, y.k), ("values", x.v, y.v)):
            found += _maps(f"{kind} {name}", pa, pb)
        if x.out is not None and y.out is not None:
            ca = match_rows(x.out.weight.t(), y.out.weight.t())
            columns = ca.index if ca.complete else None
            w = x.out.weight.shape[1]
            found.append(Point(f"{kind} context", x.out.read, y.out.read, w, y.out.weight.shape[1], columns))
            found += _maps(f"{kind} output", whole([x.out]), whole([y.out]))
    for x, y in zip(a.structure.inners, b.structure.inners, strict=False):
        if len(x.sources) == len(y.sources):
            for m, n in zip(x.sources, y.sources, strict=True):
                found += _maps("feed-forward input map", whole([m]), whole([n]))
        found += _maps("feed-forward output", whole([x.out]), whole([y.out]))
    unique: dict[tuple[int, str], Point] = {}
    for point in found:
        key = point.node_a, "" if point.columns_a is None else point.name
        unique.setdefault(key, point)
    return sorted(unique.values(), key=lambda p: p.node_a)


def _maps(name: str, pa: list[Part], pb: list[Part]) -> list[Point]:
    if len(pa) != 1 or len(pb) != 1:
        return []
    x, y = pa[0], pb[0]
    wa, wb = _taken(x), _taken(y)
    if wa.shape != wb.shape:
        return []
    columns_a, columns = x.columns, y.columns
    if not alike(wa, wb):
        rows = match_rows(wa, wb)
        if rows.complete:
            columns_a = x.columns[rows.index]
    full = len(columns_a) == x.linear.weight.shape[0] and bool((columns_a.diff() == 1).all())
    return [
        Point(
            name,
            x.linear.out,
            y.linear.out,
            x.linear.weight.shape[0],
            y.linear.weight.shape[0],
            columns_a=None if full and len(columns) == y.linear.weight.shape[0] else columns_a,
            columns=None if full and len(columns) == y.linear.weight.shape[0] else columns,
        )
    ]


def _taken(part: Part) -> Tensor:
    weight = part.linear.weight
    return weight if len(part.columns) == weight.shape[0] else weight[part.columns]


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether two matrices are the same but for rounding, by their first rows."""
    return bool((a[:2].double() - b[:2].double()).abs().max() <= 1e-2 * a[:2].abs().max().clamp(min=1e-30))


def values(a: Model, b: Model, point: Point) -> tuple[Tensor | None, Tensor | None]:
    """Both values of a point as ``[B, T, features]`` in one order of features; None: in no such form."""
    x = a.graph.canonical(a.graph.values[point.node_a], point.width_a, point.node_a)
    y = b.graph.canonical(b.graph.values[point.node_b], point.width_b, point.node_b)
    if x is None or y is None:
        return None, None
    if point.columns_a is not None:
        x = x[..., point.columns_a]
    elif point.columns is not None:
        return x[..., point.columns], y
    if point.columns is not None:
        y = y[..., point.columns]
    return x, y
