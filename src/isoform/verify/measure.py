"""How far two values are apart, and how far rounding may bring them there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import torch
from torch import Tensor

from isoform.verify.align import Model
from isoform.verify.comparison import Row

MARGIN = 64.0
"""How far above the measured amplification of one unit in the last place a difference must be to count."""
AT_ONCE = 1 << 18
"""Elements that are looked at together: what is computed from them is no second activation in memory."""


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
        if not finer and any(_inexact(part) for part in pieces(value)):
            eps = torch.finfo(value.dtype).eps
    return eps


def _rounded(buffer: Tensor) -> bool:
    """Whether constants were made in float32 and only then widened."""
    return torch.equal(buffer.float().double(), buffer) and bool((_whole(buffer) != buffer).any())


def _inexact(value: Tensor) -> bool:
    return bool(((value != _whole(value)) & (value.abs() < 1e9)).any())


def _whole(value: Tensor) -> Tensor:
    if value.is_complex():
        return torch.complex(value.real.round(), value.imag.round())
    return value.round()


@torch.no_grad()
def perturbed(a: Model, nodes: Iterable[int], eps: float) -> Iterator[tuple[int, Tensor]]:
    """Values of nodes with one unit in the last place at the token vectors, in the order of the pass."""
    generator = torch.Generator().manual_seed(2)
    given: dict[int, Tensor] = {}
    for entry in a.structure.entries:
        value = a.graph.values[entry]
        sign = torch.randint(0, 2, value.shape, generator=generator, dtype=value.dtype) * 2 - 1
        given[entry] = value * (1 + eps * sign)
    yield from a.graph.evaluated(nodes, given)


def rounding(a: Model, node: int, width: int, again: Tensor, eps: float) -> float:
    """The relative difference at a node that rounding explains: what the perturbation became there."""
    value, other = (a.graph.canonical(v, width, node) for v in (a.graph.values[node], again))
    if value is None or other is None:
        return MARGIN * eps
    noise = relative(value, other, a.real(a.role(node)))
    return MARGIN * (max(noise, eps) if noise != float("inf") else eps)


def relative(x: Tensor, y: Tensor, real: Tensor | None = None) -> float:
    """Largest difference (at real positions), relative to the largest value; infinite where NaN is in it."""
    error = size = 0.0
    for ours, theirs in zip(pieces(x, real), pieces(y, real), strict=True):
        low, high = (float(end) for end in (ours - theirs).aminmax())
        least, most = (float(end) for end in ours.aminmax())
        if low != low or least != least:
            return float("inf")
        error, size = max(error, -low, high), max(size, -least, most)
    return error / max(size, 1e-30) if size < float("inf") else size


def pieces(value: Tensor, real: Tensor | None = None) -> Iterator[Tensor]:
    """A value a piece at a time, without what stands at padding.

    Args:
        value: ``[B, T, …]`` where padding is to be left out.
        real: ``[B, T]`` True = a real token; of another shape than the value's, or None: all is there.
    """
    masked = real is not None and value.shape[:2] == real.shape and not bool(real.all())
    if value.numel() <= AT_ONCE or value.dim() < 2:
        yield value[real] if real is not None and masked else value
        return
    if not masked and value.numel() <= AT_ONCE * len(value):
        yield from (part for _, part in lines(value))
        return
    for number, row in enumerate(value):
        for start, part in lines(row):
            kept = part[real[number, start : start + len(part)]] if real is not None and masked else part
            if kept.numel():
                yield kept


def lines(value: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Pieces of a value along its first axis, and where each begins."""
    size = max(1, AT_ONCE * len(value) // max(1, value.numel()))
    for start in range(0, len(value), size):
        yield start, value[start : start + size]


def verdict(rows: list[Row], eps: float) -> Literal["equivalent", "noise", "differs"]:
    """By the result: points on the way may be in another form (another factor, another order of heads)."""
    judged = [row for row in rows if row.name in ("result", "gradient")]
    if any(row.differs for row in judged):
        return "differs"
    worst = max((row.error for row in judged), default=0.0)
    return "equivalent" if worst <= 64 * 2.0**-23 and eps < 1e-6 else "noise"
