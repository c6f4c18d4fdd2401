"""How far two models may differ by rounding alone."""

from __future__ import annotations

import torch
from torch import Tensor

from isoform.verify.align import Model
from isoform.verify.diagnose.case import Case
from isoform.verify.diagnose.unary import gap
from isoform.verify.record import Recording


def result(model: Model) -> Tensor:
    """The result, ``[B, T, …]``."""
    value = model.graph.values[model.graph.output]
    found = model.of_node(model.graph.output)
    return value if found is None else found


def allowance(model: Model, unit: float) -> float:
    """How far the result moves when every constant moves by one unit in the last place.

    Constants and buffers are made in float32 in most code: two implementations that differ in nothing but the
    order of that arithmetic differ by this much.
    """
    generator = torch.Generator().manual_seed(11)
    graph = model.graph
    moved: dict[int, Tensor] = {}
    for number in sorted(graph.useful):
        node = graph.nodes[number]
        made = graph.static[number] and not any(graph.static[n] for n in graph.args(number))
        if not node.value.is_floating_point() or not made or _of_weights(model, number):
            continue
        value = graph.values[number]
        noise = torch.rand(value.shape, generator=generator, dtype=torch.float64) * 2 - 1
        # Whole numbers are exact everywhere; masks are made of them and of the largest numbers.
        exact = ~value.isfinite() | (value == value.round()) | (value.abs() > 1e9)
        moved[number] = torch.where(exact, value, value * (1 + noise * unit))
    if not moved:
        return 1e-7
    out = graph.evaluate(graph.output, moved)
    return max(1e-7, 4 * gap(graph.values[graph.output].nan_to_num(), out.nan_to_num()))


def _of_weights(model: Model, number: int) -> bool:
    """Whether a node reads a trained parameter; a buffer is a constant."""
    trained = model.recording.trained
    return any(r.kind == "parameter" and r.name in trained for r in model.graph.nodes[number].refs())


def native(first: Recording, second: Recording, a: Model, b: Model, role: str) -> float:
    """The difference of the results as the models ran, in their own precision."""
    ours, theirs = (
        m.graph.canonical(r.result().double(), m.width(m.graph.output), m.graph.output)
        for r, m in ((first, a), (second, b))
    )
    if ours is None or theirs is None:
        return gap(first.result().double(), second.result().double())
    return Case(a, b).differ(ours, theirs, role)


def coarser(first: Recording, second: Recording) -> torch.dtype | None:
    """The coarser of two dtypes that parameters are kept in, where they differ."""
    kinds = [r.dtype for r in (first, second)]
    if kinds[0] == kinds[1] or None in kinds:
        return None
    return max((k for k in kinds if k is not None), key=lambda k: torch.finfo(k).eps)


def of_constants(recording: Recording) -> torch.dtype | None:
    """The half precision that constants are kept in, where they are: buffers turned with the module."""
    for name, value in recording.parameters.items():
        half = value.is_floating_point() and torch.finfo(value.dtype).bits < 32
        if half and name not in recording.trained and bool((value != value.round()).any()):
            return value.dtype
    return None
