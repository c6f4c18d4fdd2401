"""Wires in words: the steps that each of two models makes between two points, and where that is."""

from __future__ import annotations

import dataclasses

from isoform.verify.align import Model
from isoform.verify.diagnose import pooling
from isoform.verify.diagnose.case import Case, layer_of, profile
from isoform.verify.diagnose.factors import begins
from isoform.verify.diagnose.report import Place
from isoform.verify.diagnose.unary import Step, close, describe, function, gap
from isoform.verify.diagnose.wiring import Wire, reader

Described = tuple[Wire, Wire, list[Step], list[Step]]


def described(case: Case, wa: Wire, wb: Wire) -> list[Described]:
    """A wire with its steps; one that pools in both models is two, of tokens' vectors and of the rows'."""
    both = [
        pooling.pooled(m, w.source, w.target) if pooling.is_pooled(m, w.source, w.target) else None
        for m, w in ((case.a, wa), (case.b, wb))
    ]
    a, b = both
    whole = [(wa, wb, steps(case.a, wa), steps(case.b, wb))]
    if a is None or b is None:
        return whole
    sides = norms(a.first) - norms(b.first), norms(a.last) - norms(b.last)
    if a.single and b.single and sides[0] * sides[1] < 0:  # normalised before or after: it is the same
        return whole
    place = place_of(case, *(dataclasses.replace(w, target=p.after) for w, p in ((wa, a), (wb, b))))
    pools_differ(case, place, wb, [a.pool], [b.pool])
    front = [dataclasses.replace(w, what="trunk", half=True, target=p.before) for w, p in ((wa, a), (wb, b))]
    back = [dataclasses.replace(w, half=True, source=p.after) for w, p in ((wa, a), (wb, b))]
    halves: list[Described] = [(*front, a.first, b.first), (*back, a.last, b.last)]  # type: ignore[assignment]
    return [half for half in halves if _parted(case, half[0], half[1])]


def _parted(case: Case, wa: Wire, wb: Wire) -> bool:
    """Whether two parts give something else for the same vectors."""
    value = case.a.of_node(wa.source)
    runs = [
        None if value is None else function(m, w.source, w.target, value.shape[-1])
        for m, w in ((case.a, wa), (case.b, wb))
    ]
    if value is None or runs[0] is None or runs[1] is None:
        return True
    return gap(runs[0](value), runs[1](value)) > case.tolerance


def steps(model: Model, wire: Wire) -> list[Step]:
    value = model.of_node(wire.source)
    if value is None:
        return [Step("other")]
    if pooling.is_pooled(model, wire.source, wire.target):
        found = pooling.pooled(model, wire.source, wire.target)
        return [Step("other")] if found is None else found.steps
    held = tuple(n for n in wire.held if n != wire.source)
    return describe(model, wire.source, wire.target, value.shape[-1], value.shape, held)


def unknown(*steps: list[Step]) -> bool:
    return any(s.kind == "other" for found in steps for s in found)


def norms(steps: list[Step]) -> int:
    return sum(s.kind == "norm" for s in steps)


def pools(steps: list[Step]) -> str:
    return next((s.words for s in steps if s.kind == "pool"), "")


def place_of(case: Case, wa: Wire, wb: Wire) -> Place:
    place = case.place(_part(case, wb), wa.target, wb.target)
    if wb.what == "read" and wb.name[0] == "site":  # memory is read in another stream than it stands in
        site = next(s for s in case.a.structure.sites if s.index == wb.name[1])
        place = dataclasses.replace(place, layer=layer_of(case.a, site.query))
    return place


def _part(case: Case, wire: Wire) -> str:
    if begins(case.b, wire):
        return "embedding"
    if wire.what == "read":
        return f"stream as read by {reader(case, wire.name)}"
    return "sum of the stream" if wire.what == "add" else "stream after the sum"


def wire_profile(case: Case, wa: Wire, wb: Wire) -> dict[str, object]:
    value, out = case.a.of_node(wa.source), case.a.of_node(wa.target)
    if value is None or out is None or wa.held:
        return {}
    found = case.b.graph.evaluate(
        wb.target, {wb.source: case.b.graph.shaped(value, wb.source, value.shape[-1])}
    )
    other = case.b.graph.canonical(found, out.shape[-1], wb.target)
    return {} if other is None else profile(out, other)


def pools_differ(case: Case, place: Place, wb: Wire, sa: list[Step], sb: list[Step]) -> None:
    if pools(sa) != pools(sb):
        at = dataclasses.replace(place, layer=None)
        case.add("pooling", at, pools(sa), pools(sb), wb.target)


def alike(a: Step, b: Step) -> bool:
    """One norm's gain, up to a number added or multiplied."""
    assert a.gain is not None and b.gain is not None
    x, y = (s - s.mean() for s in (a.gain, b.gain))
    flat = [float(z.abs().max()) < 1e-6 for z in (x, y)]
    return all(flat) if any(flat) else close(x / x.norm(), y / y.norm(), 1e-4)
