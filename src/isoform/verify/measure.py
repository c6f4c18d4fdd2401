"""How far two values are apart, and how far rounding may bring them there."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from isoform.verify.align import Model
from isoform.verify.comparison import Row

MARGIN = 64.0
"""How far above the measured amplification of one unit in the last place a difference must be to count."""


def coarsest(model: Model) -> float:
    """One unit in the last place of the coarsest precision that a model computes in.

    A network in float64 whose norms or rotations are written in float32 is no more precise than those.
    """
    graph = model.graph
    kinds = {p.dtype for p in model.recording.parameters.values() if p.is_floating_point()}
    kinds.add(graph.values[graph.output].dtype)
    eps = max(torch.finfo(kind).eps for kind in kinds if kind.is_floating_point)
    for name, value in model.recording.parameters.items():
        if name not in model.recording.trained and value.dtype == torch.float64 and _rounded(value):
            eps = max(eps, torch.finfo(torch.float32).eps)
    for number in graph.useful:
        value = graph.values[number]
        inexact = value.is_floating_point() or value.is_complex()
        finer = not inexact or torch.finfo(value.dtype).eps <= eps
        # Constants in half precision are a deviation of the model and not its precision.
        finer = finer or (not graph.live[number] and torch.finfo(value.dtype).bits < 32)
        # Whole numbers, masks and infinities are exact in every precision.
        if not finer and bool(((value != _whole(value)) & (value.abs() < 1e9)).any()):
            eps = torch.finfo(value.dtype).eps
    return eps


def _rounded(buffer: Tensor) -> bool:
    """Whether constants were made in float32 and only then widened."""
    return torch.equal(buffer.float().double(), buffer) and bool((_whole(buffer) != buffer).any())


def _whole(value: Tensor) -> Tensor:
    if value.is_complex():
        return torch.complex(value.real.round(), value.imag.round())
    return value.round()


def perturbed(a: Model, nodes: list[int], eps: float) -> dict[int, Tensor]:
    """Values of nodes with one unit in the last place at the token vectors."""
    generator = torch.Generator().manual_seed(2)
    given: dict[int, Tensor] = {}
    for entry in a.structure.entries:
        value = a.graph.values[entry]
        sign = torch.randint(0, 2, value.shape, generator=generator, dtype=value.dtype) * 2 - 1
        given[entry] = value * (1 + eps * sign)
    if not given:
        return {}
    with torch.no_grad():
        return a.graph.evaluate_all(nodes, given)


def rounding(a: Model, node: int, width: int, moved: dict[int, Tensor], eps: float) -> float:
    """The relative difference at a node that rounding explains: what the perturbation became there."""
    again = moved.get(node)
    if again is None:
        return MARGIN * eps
    value, other = (a.graph.canonical(v, width, node) for v in (a.graph.values[node], again))
    if value is None or other is None:
        return MARGIN * eps
    noise = relative(value, other, a.real(a.role(node)))
    return MARGIN * (max(noise, eps) if noise != float("inf") else eps)


def relative(x: Tensor, y: Tensor, real: Tensor) -> float:
    """Largest difference at real positions, relative to the largest value; infinite where NaN is in it."""
    if x.shape[:2] == real.shape and not bool(real.all()):
        x, y = x[real], y[real]
    low, high = (x - y.to(x)).aminmax()
    least, most = x.aminmax()
    size, most = max(-float(low), float(high)), max(-float(least), float(most), 1e-30)
    return abs(size) / most if size == size and most == most else float("inf")


def verdict(rows: list[Row], eps: float) -> Literal["equivalent", "noise", "differs"]:
    """By the result: points on the way may be in another form (another factor, another order of heads)."""
    if any(row.differs for row in rows if row.name in ("result", "gradient")):
        return "differs"
    worst = max((row.error for row in rows), default=0.0)
    return "equivalent" if worst <= 64 * 2.0**-23 and eps < 1e-6 else "noise"
