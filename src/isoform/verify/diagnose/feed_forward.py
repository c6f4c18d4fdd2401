"""Between the two maps of a feed-forward network: activation, gate, their order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from isoform.verify.align import Inner, filled, values_of
from isoform.verify.diagnose.bodies import (
    CLOSE,
    Body,
    expert_function,
    identify_body,
    inside,
    tokens_of,
    told,
)
from isoform.verify.diagnose.case import Case, profile
from isoform.verify.diagnose.norms import norm_differs
from isoform.verify.diagnose.report import Place
from isoform.verify.diagnose.residues import Said, explain, forms
from isoform.verify.diagnose.unary import gap
from isoform.verify.rows import Rows, inverse


def check(case: Case, a: Inner, b: Inner) -> None:
    """One feed-forward network of both models."""
    ends = ((i.out.read, [linear.out for linear in i.sources]) for i in (a, b))
    with case.within(*ends):
        _check(case, a, b)


def _check(case: Case, a: Inner, b: Inner) -> None:
    pa, pb = a.parts, b.parts
    place = case.place("feed-forward", a.out.read, b.out.read)
    value, own = values_of(case.a, pa), values_of(case.b, pb)
    width = a.out.weight.shape[1]
    ours = case.a.graph.canonical(case.a.graph.values[a.out.read], width, a.out.read)
    if value is None or own is None or ours is None:
        return
    if value.shape != own.shape or b.out.weight.shape[1] != width:
        case.add("unexplained", place, f"is {value.shape[-1]} wide", f"is {own.shape[-1]} wide", b.out.node)
        return
    rows: Rows | None = case.rows.get(("inner", b.index))
    fed = value if rows is None else value[..., rows.index] * rows.scale
    given: dict[int, Tensor] = {}
    filled(case.b, pb, fed, given)
    theirs = case.b.graph.canonical(case.b.graph.evaluate(b.out.read, given), width, b.out.read)
    columns: Rows | None = case.rows.get(("inner", b.index, "out"))
    if columns is not None:
        ours = ours[..., columns.index] / columns.scale
    if theirs is None:
        return
    role = case.a.role(a.out.read)
    difference = case.differ(ours, theirs, role)
    case.checked.append(("feed-forward", b.out.read, difference))
    if difference <= case.tolerance and not _far(case, a, b, rows, columns):
        return
    evidence = {"relative_difference": difference, "profile": profile(ours, theirs)}
    _explain(case, place, (a, b), rows, columns, **evidence)


def _explain(
    case: Case,
    place: Place,
    ends: tuple[Inner, Inner],
    rows: Rows | None,
    columns: Rows | None,
    **evidence: Any,
) -> None:
    count, order = len(case.raw), ends[1].out.node
    a, b = identify_body(case.a, ends[0]), identify_body(case.b, ends[1])
    if _beside(case, place, ends, (a, b), rows, columns, **evidence):
        return
    if "other" not in (a.form, b.form):
        _compare(case, place, a, b, rows, order)
    if len(case.raw) == count:
        case.add("unexplained", place, told(a), told(b), order, **evidence)


def _beside(
    case: Case,
    place: Place,
    ends: tuple[Inner, Inner],
    bodies: tuple[Body, Body],
    rows: Rows | None,
    columns: Rows | None,
    **evidence: Any,
) -> bool:
    """Whether one body is known, and the other as far as it is that one; notes what it does beside it."""
    nameless = [body.activation is None for body in bodies]
    if nameless[0] == nameless[1]:
        return False
    side = nameless.index(True)
    model, inner, known = (case.a, case.b)[side], ends[side], bodies[1 - side]
    parts = inside(model, inner)
    if parts is None:
        return False
    other, shape = parts
    x = 2.5 * torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    same = Rows(torch.arange(shape[-1]), torch.ones(shape[-1], dtype=torch.float64))
    into, out = rows or same, columns
    if side == 0:
        into, out = inverse(into), None if out is None else inverse(out)

    def tried(x: Tensor) -> Iterator[tuple[list[Said], Tensor]]:
        read = torch.empty_like(x)  # as the known one reads it
        read[..., into.index] = x / into.scale
        for said, values in forms(known, read):
            yield said, values if out is None else values[..., out.index] / out.scale

    gate = None
    if known.gate is not None:
        taken = set(known.gate.tolist())
        gate = torch.tensor([i for i, k in enumerate(into.index.tolist()) if k in taken])
    found = explain(known, gate, x, tried, other, deep=bodies[side].form == "other")
    if found is None:
        return False
    for kind, *both in found[0]:
        ours, theirs = both[:: 1 if side else -1]
        case.add(kind, place, ours, theirs, ends[1].out.node)
    words = [told(known), f"{found[1]} besides" if found[0] else f"does so and {found[1]}"]
    ours, theirs = words[:: 1 if side else -1]
    case.add("unexplained", place, ours, theirs, ends[1].out.node, **evidence)
    return True


def _far(case: Case, a: Inner, b: Inner, rows: Rows | None, columns: Rows | None) -> bool:
    """Whether they part on larger pre-activations than these inputs give."""
    pa, pb = a.parts, b.parts
    value = values_of(case.a, pa)
    assert value is not None
    generator = torch.Generator().manual_seed(3)
    x = 3.0 * torch.randn(value.shape, generator=generator, dtype=torch.float64)
    first: dict[int, Tensor] = {}
    second: dict[int, Tensor] = {}
    filled(case.a, pa, x, first)
    filled(case.b, pb, x if rows is None else x[..., rows.index] * rows.scale, second)
    width = a.out.weight.shape[1]
    one = case.a.graph.canonical(case.a.graph.evaluate(a.out.read, first), width, a.out.read)
    two = case.b.graph.canonical(case.b.graph.evaluate(b.out.read, second), width, b.out.read)
    assert one is not None and two is not None
    if columns is not None:
        one = one[..., columns.index] / columns.scale
    return case.differ(one, two, case.a.role(a.out.read)) > 1e-5


def check_expert(case: Case, a: Inner, b: Inner) -> None:
    """One expert's network of both models, each on the tokens that it gets."""
    width = a.out.weight.shape[1]
    if b.out.weight.shape[1] != width or case.rows.get(("inner", b.index)) is None:
        return
    rows: Rows = case.rows[("inner", b.index)]
    columns: Rows | None = case.rows.get(("inner", b.index, "out"))
    lengths = [tokens_of(m, i) for m, i in ((case.a, a), (case.b, b))]
    if 0 in lengths:
        return
    generator = torch.Generator().manual_seed(3)
    features = sum(s.weight.shape[0] for s in a.sources)
    x = 3.0 * torch.randn(1, max(lengths), features, generator=generator, dtype=torch.float64)
    one = expert_function(case.a, a)(x[:, : lengths[0]], a.out.read, width)
    two = expert_function(case.b, b)((x[..., rows.index] * rows.scale)[:, : lengths[1]], b.out.read, width)
    same = min(lengths)
    one = one if columns is None else one[..., columns.index] / columns.scale
    if gap(one[:, :same], two[:, :same]) <= 1e-5:
        return
    whose = b.whose or a.whose or " of an expert"
    place = case.place("feed-forward" + whose, a.out.read, b.out.read)
    _explain(case, place, (a, b), rows, columns)


def _compare(case: Case, place: Place, a: Body, b: Body, rows: Rows | None, order: int) -> None:
    add = lambda kind, x, y: case.add(kind, place, x, y, order)  # noqa: E731
    if a.form != b.form:
        if {a.form, b.form} == {"gated", "product"}:
            add("gate-order", told(a), told(b))
        return
    if a.form == "gated" and a.gate is not None and b.gate is not None:
        mine = set(a.gate.tolist())
        theirs = {int(rows.index[i]) for i in b.gate.tolist()} if rows is not None else set(b.gate.tolist())
        if mine != theirs:
            swapped = not mine & theirs
            words = (
                ("activates the gate", "activates the content")
                if swapped
                else ("takes the gate from one set of columns", "takes it from another")
            )
            add("gate-order", *words)
    if not _same_shift(a.shift, b.shift):
        words = {True: "adds no bias in front of the activation", False: "adds a bias there"}
        add("bias-missing", words[a.shift is None], words[b.shift is None])
    if a.activation != b.activation:
        add(
            "activation",
            f"applies {a.activation or 'an activation of its own'}",
            f"applies {b.activation or 'an activation of its own'}",
        )
    if (a.after is None) != (b.after is None):
        add("norm-missing", told(a), told(b))
    elif a.after is not None and b.after is not None:
        norm_differs(case, place, order, a.after, b.after)


def _same_shift(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return gap(a, b) < CLOSE
