"""Two models on the values that they hold, part by part."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from isoform.errors import ShapeError
from isoform.verify.align import Inner, Model, Site
from isoform.verify.diagnose import (
    attention,
    ending,
    feed_forward,
    loading,
    masks,
    precision,
    stream,
    weights,
)
from isoform.verify.diagnose.case import Case, layer_of
from isoform.verify.diagnose.lengths import OUTER
from isoform.verify.diagnose.pairing import alone, pair, pairs
from isoform.verify.diagnose.parts import Linear
from isoform.verify.diagnose.report import Diagnosis
from isoform.verify.diagnose.rounding import allowance, native, of_constants, result
from isoform.verify.diagnose.structure import Structure
from isoform.verify.diagnose.unary import gap

_MASKS = frozenset(("mask-polarity", "cross-mask", "causality", "sliding-window"))


def examine(a: Model, b: Model, *, latent: bool = False) -> Diagnosis:
    """Compare two models on the values that they hold."""
    a, b = _same_beginning(a, b)
    first, second = a.recording, b.recording
    rounding = a.graph.rounding or of_constants(first) or of_constants(second)
    ours, theirs = result(a), result(b)
    if ours.shape[:2] != theirs.shape[:2]:
        raise ShapeError(
            f"results of shape {list(ours.shape)} and {list(theirs.shape)}: not the same content"
        )
    widths = [m.width(m.structure.states[-1]) if m.structure.states else 0 for m in (a, b)]
    if all(widths) and widths[0] != widths[1]:
        raise ShapeError(f"streams of {widths[0]} and {widths[1]} features: not two versions of one network")
    pair(a, b)
    case = Case(a, b)
    if rounding is not None:  # constants are kept in the coarser dtype too
        case.round(2 * torch.finfo(rounding).eps)
    role = a.role(a.graph.output)
    difference = case.differ(ours, theirs, role)
    precision.check(case)
    unit = 2.0**-23 if rounding is None else torch.finfo(rounding).eps / 2
    allowed = max(allowance(m, unit) for m in (a, b))
    evidence: dict[str, Any] = {"relative_difference": difference, "explained_by_rounding": allowed}
    if stream.EXACT < difference <= allowed:
        stream.check_small(case)
    if latent and difference <= allowed:
        _beyond(case)
    if rounding is not None and stream.EXACT < difference <= allowed:
        count = len(case.raw)
        run(case)
        case.raw = [r for i, r in enumerate(case.raw) if i < count or r.exact]
    if difference <= allowed and not case.raw:
        as_run = native(first, second, a, b, role)
        verdict = "equivalent" if rounding is None and as_run <= 1e-3 else "noise"
        return Diagnosis(first.subject, second.subject, verdict, (), {**evidence, "as_run": as_run})
    if difference > allowed:
        run(case)
    findings = case.findings(latent=latent)
    # Every part is the same function, so the whole is: what is left has grown from the rounding of constants.
    grown = 1e-4 if rounding is None else 8 * torch.finfo(rounding).eps
    if not findings and difference <= grown:
        return Diagnosis(first.subject, second.subject, "noise", (), evidence)
    if not findings:
        place = case.place("whole model", a.graph.output, b.graph.output)
        case.add("unexplained", place, "gives one result", "gives another", b.graph.output)
        findings = case.findings(latent=latent)
    return Diagnosis(first.subject, second.subject, "differs", tuple(findings), evidence)


def _same_beginning(a: Model, b: Model) -> tuple[Model, Model]:
    """Vectors may be put in front before positions are added in one model, and after that in the other."""
    if not all(any(role.startswith(OUTER) for role in m.graph.lengths) for m in (a, b)):
        return a, b
    if _begin_alike(a, b):
        return a, b
    later = a.placed(), b.placed()
    return next((pair for pair in ((a, later[1]), (later[0], b)) if _begin_alike(*pair)), (a, b))


def _begin_alike(a: Model, b: Model) -> bool:
    pairs = zip(a.structure.entries, b.structure.entries, strict=False)
    values = [(a.of_node(x), b.of_node(y)) for x, y in pairs]
    return all(x is not None and y is not None and gap(x, y) < 1e-6 for x, y in values)


def run(case: Case) -> None:
    """Every part of both models."""
    a, b = case.a.structure, case.b.structure
    sites, inners = pairs(a.sites, b.sites), pairs(a.inners, b.inners)
    for x, y in sites:
        weights.check_site(case, x, y)
    for x, y in inners:
        weights.check_inner(case, x, y)
    for x, y in pairs(a.experts, b.experts):
        weights.check_inner(case, x, y)
        feed_forward.check_expert(case, x, y)
    _unpaired(case)
    others_a, others_b = _others(case.a), _others(case.b)
    for x, y in zip(others_a, others_b, strict=False):
        weights.check_other(case, x, y, last=y is others_b[-1])
    ends = case.a.graph.output, case.b.graph.output
    _guarded(case, "stream", ends, lambda: stream.check(case))
    for x, y in sites:
        _guarded(case, "attention", (x.scores, y.scores), partial(attention.check, case, x, y))
    masks.join_windows(case)
    for x, y in inners:
        _guarded(case, "feed-forward", (x.out.node, y.out.node), partial(feed_forward.check, case, x, y))
    _guarded(case, "result", ends, lambda: ending.check(case))
    loading.join(case)
    layers = {r.place.layer for r in case.raw if r.kind in _MASKS}
    # Rows without anything to read are what such a mask leaves.
    case.raw = [r for r in case.raw if r.kind != "masked-row-nan" or r.place.layer not in layers]


def _beyond(case: Case) -> None:
    """Activations that part only on larger numbers than these inputs give."""
    for x, y in pairs(case.a.structure.inners, case.b.structure.inners):
        count = len(case.raw)
        weights.check_inner(case, x, y)
        if len(case.raw) == count:
            feed_forward.check(case, x, y)
    case.raw = [r for r in case.raw if r.kind in ("activation", "gate-order", "norm-eps")]


def _guarded(case: Case, part: str, nodes: tuple[int, int], check: Callable[[], None]) -> None:
    """A part that cannot be run on the other model's values is unexplained; the others are said."""
    try:
        check()
    except (RuntimeError, IndexError) as error:
        words = "runs on these values", "cannot be run on them"
        case.add("unexplained", case.place(part, *nodes), *words, nodes[1], error=str(error))


def _unpaired(case: Case) -> None:
    """The first part that only one of the models has."""
    a, b = case.a.structure, case.b.structure
    lost = [*alone(a.sites, b.sites), *alone(a.inners, b.inners)]
    more = [*alone(b.sites, a.sites), *alone(b.inners, a.inners)]
    # Without a residual sum between them, maps look as if they belonged to one feed-forward network.
    lost = [x for x in lost if isinstance(x, Site) or x.out not in _inputs(a)]
    more = [x for x in more if isinstance(x, Site) or x.out not in _inputs(b)]
    if not lost and not more:
        return
    # A source that nothing reads is not run at all: the parts that would have read it are the ones missing.
    lost, more = _of_target(case.a, lost) or lost, _of_target(case.b, more) or more
    first = min(lost or more, key=lambda x: x.out.node if x.out is not None else 0)
    node = first.out.node if first.out is not None else 0
    same = case.b.sources_at(case.a.sources.get(first.out.out)) if lost and first.out is not None else None
    ends = case.a.graph.output, case.b.graph.output
    here, there = (node, ends[1] if same is None else same) if lost else (ends[0], node)
    seen = first
    if lost and same is not None:  # what A does not see as an attention may be one for B
        seen = next((x for x in more if x.out is not None and x.out.out == same), first)
    part = "feed-forward"
    if isinstance(seen, Site):
        part = "cross-attention" if seen.cross else "self-attention"
    words = [f"has {len(s.sites)} attentions and {len(s.inners)} feed-forward networks" for s in (a, b)]
    if same is not None:
        words = [f"computes this as {part} does", "computes it in a way of its own"]
        words = words if seen is first else words[::-1]
    place = case.place(part, here, there)
    if place.layer is None:
        place = dataclasses.replace(place, layer=layer_of(case.b, there))
    case.add("unexplained", place, words[0], words[1], there)
    case.torn = True


def _of_target(model: Model, parts: list[Site | Inner]) -> list[Site | Inner]:
    return [x for x in parts if x.out is not None and model.role(x.out.out) == "target"]


def _inputs(structure: Structure) -> set[Linear]:
    """Maps that something is made of right away: queries, keys, values, what is between two maps."""
    found = {part.linear for site in structure.sites for _, part in site.parts()}
    return found | {linear for inner in structure.inners for linear in inner.sources}


def _others(model: Model) -> list[Any]:
    taken = {s.out for s in model.structure.sites} | {i.out for i in model.structure.inners}
    taken |= {p.linear for s in model.structure.sites for _, p in s.parts()}
    taken |= {linear for i in model.structure.inners for linear in i.sources}
    return [n for n in model.structure.linears if n not in taken]
