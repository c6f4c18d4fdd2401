"""What depends on the precision of a run: rotations computed in half precision, rows that become NaN."""

from __future__ import annotations

import torch

from isoform.verify.align import Model, Site
from isoform.verify.diagnose.case import Case
from isoform.verify.diagnose.pairing import pairs
from isoform.verify.diagnose.sites import over_keys

COARSE = 1e-4
"""Relative rounding of an angle or position above which it is not float32's."""


def check(case: Case) -> None:
    """Deviations that the comparison in float64 leaves out."""
    for a, b in pairs(case.a.structure.sites, case.b.structure.sites):
        one, two = _coarse(case.a, a), _coarse(case.b, b)
        if (one is None) != (two is None):
            place = case.place("rotation of queries and keys", one or a.query, two or b.query)
            coarse_a, coarse_b = _kept(case.a, one), _kept(case.b, two)
            case.add(
                "rope-precision",
                place,
                f"computes positions, angles or their sine and cosine in {coarse_a}",
                f"computes them in {coarse_b}",
                b.query,
            )
    _nan(case)


def _kept(model: Model, node: int | None) -> str:
    if node is None:
        return "full precision"
    return str(model.graph.nodes[node].value.dtype).removeprefix("torch.")


def _coarse(model: Model, site: Site) -> int | None:
    """A node in half precision that leads to queries or keys and carries positions, not content."""
    graph = model.graph
    widest = max(
        (p.dtype for p in model.recording.parameters.values() if p.is_floating_point() and p.dim() >= 2),
        key=lambda d: -torch.finfo(d).eps,
        default=torch.float32,
    )
    for operand in (site.query, site.key):
        seen: set[int] = set()
        stack = [
            n
            for r in graph.region(operand, model.structure.stops)
            for n in graph.args(r)
            if not graph.live[n]
        ]
        while stack:
            n = stack.pop()
            if n in seen:
                continue
            seen.add(n)
            stack += graph.args(n)
        for number in sorted(seen):
            value = graph.nodes[number].value
            if not value.is_floating_point() or torch.finfo(value.dtype).bits >= 32:
                continue
            if torch.finfo(value.dtype).eps <= torch.finfo(widest).eps:
                continue
            exact = graph.values[number]
            if float((value.double() - exact).abs().max()) > COARSE * float(
                exact.abs().max().clamp(min=1e-30)
            ):
                return number
    return None


def _nan(case: Case) -> None:
    """Results that are NaN at real positions in one model only."""
    found: list[bool] = []
    for model in (case.a, case.b):
        native = model.recording.result().double()
        value = model.graph.canonical(native, native.shape[-1], model.graph.output)
        real = model.real(model.role(model.graph.output))
        at = native if value is None or value.shape[:2] != real.shape else value[real]
        found.append(bool(at.isnan().any()))
    if found[0] == found[1]:
        return
    model = case.a if found[0] else case.b
    first = next(
        (
            n.number
            for n in model.graph.nodes
            if n.number in model.graph.useful and bool(n.value.isnan().any())
        ),
        model.graph.output,
    )
    site = next((s for s in model.structure.sites if s.softmax == first), None)
    if site is not None and not over_keys(model.graph, first):
        return  # not a row of keys that is masked
    a, b = (first, case.b.graph.output) if found[0] else (case.a.graph.output, first)
    words = ("gives NaN at real positions", "gives numbers")
    case.add("masked-row-nan", case.place("masked rows", a, b), words[not found[0]], words[not found[1]], b)
