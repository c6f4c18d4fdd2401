"""Numbers that a part of a model is computed with: are they the same in the other model, to the last place?

Where one model is kept in a coarser dtype than the other, tables and frequencies that are buffers are rounded
in it, and what was folded into parameters before they were rounded is rounded otherwise. Both passes are run
again in float64, so a part without such numbers is the same function exactly, or it is not.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from isoform.verify.align import Model
from isoform.verify.record import Ref
from isoform.verify.rows import match_rows

Ends = tuple[int, Collection[int]]
"""Where a part ends, and the nodes that it starts from."""


def same_constants(a: Model, b: Model, ends_a: Ends, ends_b: Ends) -> bool:
    """Whether two parts are computed with the same parameters and with no rounded constants."""
    one, two = _constants(a, *ends_a), _constants(b, *ends_b)
    if one is None or two is None or len(one) != len(two):
        return False
    if not all(any(x.numel() == y.numel() and _equal(x, y) for x in one) for y in two):
        return False
    return _same_maps(_maps(a, ends_a), _maps(b, ends_b)) and _same_entries(a, b, ends_a[1], ends_b[1])


def _maps(model: Model, ends: Ends) -> list[Tensor]:
    """The matrices that a part starts from, and the one that reads it."""
    structure = model.structure
    found = [structure.by_out[n].weight for n in ends[1] if n in structure.by_out]
    return found + [x.weight.t() for x in structure.linears if x.read == ends[0]]


def _same_maps(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether matrices have the same rows, whatever their order: a factor that was folded in leaves none."""
    for width in {w.shape[1] for w in (*a, *b)}:
        one, two = ([w for w in x if w.shape[1] == width] for x in (a, b))
        if not one or not two:
            return False
        rows = match_rows(torch.cat(one), torch.cat(two))
        if not rows.complete or not torch.equal(torch.cat(one)[rows.index], torch.cat(two)):
            return False
    return True


def _same_entries(a: Model, b: Model, starts_a: Collection[int], starts_b: Collection[int]) -> bool:
    one, two = (
        [m.graph.values[n] for n in s if n in m.structure.entries] for m, s in ((a, starts_a), (b, starts_b))
    )
    return all(any(x.shape == y.shape and torch.equal(x, y) for x in one) for y in two)


def _constants(model: Model, target: int, starts: Collection[int]) -> list[Tensor] | None:
    """The parameters that a part reads; None: also constants in floating point that are no whole numbers."""
    graph, found = model.graph, dict[Ref, Tensor]()
    seen, stack = set(starts), [] if target in starts else [target]
    while stack:
        number = stack.pop()
        if number in seen:
            continue
        seen.add(number)
        for ref in graph.nodes[number].refs():
            if ref.kind == "node":
                stack.append(int(ref.name))
            elif ref.kind == "parameter" and ref.name in model.recording.trained:
                found[ref] = graph.value(ref)
            elif ref.kind in ("parameter", "constant") and _inexact(graph.value(ref)):
                return None
    return list(found.values())


def _inexact(value: Tensor) -> bool:
    if not (value.is_floating_point() or value.is_complex()):
        return False
    parts = torch.view_as_real(value) if value.is_complex() else value
    return bool(((parts != parts.round()) & (parts.abs() < 1e9)).any())


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.reshape(-1), b.reshape(-1))
