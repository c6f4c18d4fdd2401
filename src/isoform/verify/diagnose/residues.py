"""What is left of a feed-forward body when a listed deviation is taken away: told where it is simple enough.

A body that is none of the known ones may be one of them with something else done beside it. That is held for
proven where what is left is a relation that does not hold without the deviation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from isoform.verify.diagnose.bodies import ACTIVATIONS, CLOSE, Body, Inside, told
from isoform.verify.diagnose.unary import gap

Said = tuple[str, str, str]
"""A slug, and what each model does."""

Tried = Callable[[Tensor], Iterable[tuple[list[Said], Tensor]]]
"""Deviations and the values under them, for what is read."""

RUNS = 20
"""More runs than these are too many to tell how channels are mixed."""

SMOOTH = 4.0
"""A function goes up and down less often than this, by its range."""

LOWERED = 0.8
"""Share of the squared difference that may be left where a deviation is undone and something else remains."""


def forms(body: Body, x: Tensor) -> Iterator[tuple[list[Said], Tensor]]:
    """What may stand between two maps, the body as it is first: what is said of it, and its values."""
    own = body.activation
    if own not in ACTIVATIONS or body.after is not None or body.shift is not None:
        return
    other = {n: ("activation", f"applies {own}", f"applies {n}") for n in ACTIVATIONS if n != own}
    act = ACTIVATIONS[own]
    if body.form == "pointwise":
        yield [], act(x)
        yield from (([said], ACTIVATIONS[n](x)) for n, said in other.items())
    elif body.form == "gated" and body.gate is not None:
        gate, content = halves(body, x)
        swapped = ("gate-order", "activates the gate", "activates the content")
        yield [], act(gate) * content
        yield [swapped], act(content) * gate
        yield [("gate-order", swapped[1], "activates the product")], act(content * gate)
        yield from (([said], ACTIVATIONS[n](gate) * content) for n, said in other.items())
        yield from (([swapped, said], ACTIVATIONS[n](content) * gate) for n, said in other.items())


def halves(body: Body, x: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and content."""
    assert body.gate is not None
    return x[..., body.gate], x[..., _others(body.gate, x.shape[-1])]


def explain(
    known: Body, gate: Tensor | None, x: Tensor, tried: Tried, other: Inside, *, deep: bool
) -> tuple[list[Said], str] | None:
    """What another body does: deviations from a known one, and in words what it does beside them.

    Args:
        known: one model's body.
        gate: its gate in the order of the other's columns.
        x: ``[B, T, columns]`` what the other reads.
        tried: what it would give for that, as the known one is and with deviations; see `forms`.
        other: the other model's body.
        deep: look at its operations too: it is no activation of its own.

    Returns:
        None where nothing can be said.
    """
    found, first = other.run(x), None
    for said, values in tried(x):
        first = values if first is None else first
        rest = residue(values, found)
        if rest is not None:
            return said, rest
    if first is None or not deep:
        return None
    if gate is not None:
        way, said = min(((_way(values, found), said) for said, values in tried(x)), key=lambda w: w[0])
        if way < SMOOTH:
            return said, "bends what it hands on"
        added = _added(known, x[..., gate], x[..., _others(gate, x.shape[-1])], found)
        if added is not None:
            return added, "adds the gate to the content"
    return _mixed(x, tried, other) or _undone(known, gate, x, first, other)


def _added(known: Body, gate: Tensor, content: Tensor, found: Tensor) -> list[Said] | None:
    """The deviations of a body that adds gate and content; None: it does not."""
    for swapped, (one, two) in enumerate(((gate, content), (content, gate))):
        for name, f in ACTIVATIONS.items():
            if gap(f(one) + two, found) < CLOSE:
                said = [("gate-order", "activates the gate", "activates the content")][:swapped]
                other = ("activation", f"applies {known.activation}", f"applies {name}")
                return said if name == known.activation else [*said, other]
    return None


def _mixed(x: Tensor, tried: Tried, other: Inside) -> tuple[list[Said], str] | None:
    """What is a mixture of a form's channels, or of its positions."""
    tokens, width = x.shape[0] * x.shape[1], other.run(x).shape[-1]
    runs = 1 + (width + width // 2) // tokens
    if runs > RUNS:
        return None
    generator = torch.Generator().manual_seed(13)
    every = [x, *(2.5 * torch.randn(x.shape, generator=generator, dtype=x.dtype) for _ in range(runs))]
    found = [other.run(one) for one in every]
    if not all(bool(y.isfinite().all()) for y in found):
        return None
    rows = torch.cat([y.flatten(0, 1) for y in found])
    for options in zip(*(tried(one) for one in every), strict=True):
        said = options[0][0]
        own = torch.cat([values.flatten(0, 1) for _, values in options])
        own = torch.cat([own, own.new_ones(len(own), 1)], 1)
        if gap(own @ torch.linalg.lstsq(own, rows, driver="gelsd").solution, rows) < CLOSE:
            return said, "mixes what it hands on over channels"
        one, y = (torch.cat(v, -1)[0].t() for v in ([values for _, values in options], found))
        mixed = one @ torch.linalg.lstsq(one, y, driver="gelsd").solution
        if len(one) > 2 * one.shape[1] and gap(mixed, y) < CLOSE:
            return said, "mixes what it hands on over positions"
    return None


def residue(a: Tensor, b: Tensor) -> str | None:
    """How ``b`` comes from ``a``, both ``[B, T, d]``, if in a simple way."""
    if a.shape != b.shape or not bool(b.isfinite().all()) or not float(b.abs().max()):
        return None
    ratio = float((a * b).sum() / a.square().sum().clamp(min=1e-30))
    if ratio and gap(a * ratio, b) < CLOSE:
        return f"multiplies what it hands on by {ratio:.6g}"
    low, high = b.min(), b.max()
    kept = ((b > low) & (b < high)).double().mean()
    if 0.05 < float(kept) < 1 and gap(a.clamp(low, high), b) < CLOSE:
        return f"cuts what it hands on off at {float(low):.4g} and {float(high):.4g}"
    same = (a - b).abs() <= CLOSE * b.abs().max()
    for axes, what in (((0, 2), "positions"), ((0, 1), "channels")):
        equal = same.all(axes[1]).all(axes[0])
        if float(equal.double().mean()) >= 0.25:
            other = (~equal).nonzero()[:, 0].tolist()
            return f"does something else at {what} " + ", ".join(map(str, other[:6]))
    rows = (a * b).sum(-1, keepdim=True) / a.square().sum(-1, keepdim=True).clamp(min=1e-30)
    if gap(a * rows, b) < CLOSE:
        return "multiplies each token's vector by a number of its own"
    x, y = a.flatten(0, 1), b.flatten(0, 1)
    u, v = x - x.mean(0), y - y.mean(0)
    slope = (u * v).sum(0) / u.square().sum(0).clamp(min=1e-30)
    if len(x) > 4 and gap(u * slope, v) < CLOSE:
        return "multiplies channels by numbers of their own or adds to them"
    if gap(a.sort(-1).values, b.sort(-1).values) < CLOSE:
        return "hands channels on in another order"
    for k in range(1, a.shape[1]):
        if gap(a.roll(k, 1)[:, k:], b[:, k:]) < CLOSE or gap(a.roll(-k, 1)[:, :-k], b[:, :-k]) < CLOSE:
            return f"hands positions on {k} places off"
    return None


def _way(a: Tensor, b: Tensor) -> float:
    """How far ``b`` goes up and down in order of ``a``, by its range: not far if it is its function."""
    if a.numel() < 200 or not bool(b.isfinite().all()):
        return math.inf
    ordered = b.flatten()[a.flatten().argsort()]
    return float((ordered[1:] - ordered[:-1]).abs().sum() / (ordered.max() - ordered.min()).clamp(min=1e-30))


def _undone(
    known: Body, columns: Tensor | None, x: Tensor, wanted: Tensor, other: Inside
) -> tuple[list[Said], str] | None:
    """An activation that is another operation's in the other body: undone, less must be left to explain."""
    own, values = known.activation, other.values(x)
    rest = None if columns is None else _others(columns, x.shape[-1])
    gate, content = (x, None) if columns is None or rest is None else (x[..., columns], x[..., rest])

    def last(half: Tensor | None) -> tuple[int, str] | None:
        """The last operation that is an activation of these columns."""
        if half is None:
            return None
        for node in sorted((n for n, v in values.items() if v.shape == half.shape), reverse=True):
            for name, f in ACTIVATIONS.items():
                if name != "identity" and gap(f(half), values[node]) < CLOSE:
                    return node, name
        return None

    at, turned = last(gate), last(content)
    if at is not None and at[1] != own and turned is None and own is not None:
        said = ("activation", f"applies {own}", f"applies {at[1]}")
        repaired = other.put(x, at[0], ACTIVATIONS[own](gate))
    elif at is None and turned is not None and turned[1] == own and content is not None:
        said = ("gate-order", "activates the gate", "activates the content")
        swapped = x.clone()
        swapped[..., rest], swapped[..., columns] = gate, content
        repaired = other.run(swapped)
    else:
        return None
    before, after = ((wanted - y).square().mean() for y in (other.run(x), repaired))
    return ([said], told(Body("other"))) if float(after) < LOWERED * float(before) else None


def _others(columns: Tensor, size: int) -> Tensor:
    rest = torch.ones(size, dtype=torch.bool)
    rest[columns] = False
    return rest.nonzero()[:, 0]
