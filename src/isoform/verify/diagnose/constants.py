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

Ends = tuple[int, Collection[int]]
"""Where a part ends, and the nodes that it starts from."""


def same_constants(a: Model, b: Model, ends_a: Ends, ends_b: Ends) -> bool:
    """Whether two parts are computed with the same parameters and with no rounded constants."""
    one, two = _constants(a, *ends_a), _constants(b, *ends_b)
    if one is None or two is None or len(one) != len(two):
        return False
    return all(any(x.numel() == y.numel() and _equal(x, y) for x in one) for y in two)


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
