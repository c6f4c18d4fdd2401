"""From the last linear map to the result: caps, multipliers, pooling."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from isoform.verify.align import Linear, Model
from isoform.verify.diagnose.case import Case
from isoform.verify.diagnose.pooling import describe_pooling
from isoform.verify.diagnose.report import Place
from isoform.verify.diagnose.unary import gap


def check(case: Case) -> None:
    """The result as a function of the head's output."""
    a, b = case.a, case.b
    top_a, top_b = _head(case, True), _head(case, False)
    if top_a is not None and top_b is not None:
        with case.within((a.graph.output, [top_a]), (b.graph.output, [top_b])):
            _check(case, top_a, top_b)


def _check(case: Case, top_a: int, top_b: int) -> None:
    a, b = case.a, case.b
    la, lb = a.structure.by_out[top_a], b.structure.by_out[top_b]
    value, own = a.of_linear(la), b.of_linear(lb)
    if value is None or own is None or value.shape != own.shape:
        return
    place = dataclasses.replace(case.place("result", a.graph.output, b.graph.output), layer=None)
    width, rows = value.shape[-1], case.rows.get(("other", lb.node))
    factor = 1.0  # the same head, times a number
    if rows is not None and rows.scaled and float(rows.scale.std()) < 1e-6 * float(rows.scale.mean()):
        factor = float(rows.scale.mean())
    ours = a.graph.canonical(a.graph.values[a.graph.output], width, a.graph.output)
    theirs = b.graph.evaluate(b.graph.output, {top_b: b.graph.shaped(value * factor, top_b, width)})
    found = b.graph.canonical(theirs, width, b.graph.output)
    if ours is None or found is None or ours.shape != found.shape:
        return
    role = a.role(a.graph.output)
    difference = case.differ(ours, found, role)
    case.checked.append(("result", b.graph.output, difference))
    if difference <= case.tolerance:
        return
    if value.shape[1] > 1 and ours.shape[1] == 1:
        pools = describe_pooling(a, top_a, a.graph.output), describe_pooling(b, top_b, b.graph.output)
        case.add(
            "unexplained" if pools == (None, None) else "pooling",
            place,
            pools[0] or "puts the tokens' results together in a way of its own",
            pools[1] or "puts them together in a way of its own",
            b.graph.output,
            relative_difference=difference,
        )
        return
    if _scaled_before_bias(case, place, (la, lb), value, ours, top_b):
        return
    words_a, words_b = _describe(value, ours), _describe(value, found, factor)
    if None in (words_a, words_b) and _bias_before(case, place, (top_a, top_b), value, ours, found):
        return
    shift = _shift(value, found) if words_b is None else _shift(value, ours) if words_a is None else None
    if shift is not None and (words_a or words_b):
        words = {True: "adds no further vector to the logits", False: "adds one"}
        size = float(shift.abs().max())
        case.add(
            "output-bias", place, words[bool(words_a)], words[bool(words_b)], b.graph.output, largest=size
        )
        return
    kind = "unexplained" if None in (words_a, words_b) else "softcap"
    case.add(
        kind,
        place,
        words_a or "computes the result from the logits in one way",
        words_b or "computes it in another",
        b.graph.output,
        relative_difference=difference,
    )


def _scaled_before_bias(
    case: Case, place: Place, heads: tuple[Linear, Linear], value: Tensor, ours: Tensor, top: int
) -> bool:
    """One bias in both models, a factor in front of it in one: the factor is what differs, not the bias."""
    if heads[0].has_bias == heads[1].has_bias:
        return False
    bias = heads[0].bias if heads[0].has_bias else heads[1].bias
    bare = value - bias if heads[0].has_bias else value
    fed, graph = bare + bias if heads[1].has_bias else bare, case.b.graph
    out = graph.evaluate(graph.output, {top: graph.shaped(fed, top, fed.shape[-1])})
    theirs = graph.canonical(out, bare.shape[-1], graph.output)
    if theirs is None or theirs.shape != bare.shape:
        return False
    factors: list[float] = []
    for result in (ours, theirs):
        rest = result - bias
        factors.append(float((bare * rest).sum() / bare.square().sum()))
        if gap(bare * factors[-1], rest) > 1e-6:
            return False
    if abs(factors[0] - factors[1]) < 1e-6:
        return False
    case.raw = [r for r in case.raw if r.kind != "output-bias"]
    words = [
        "adds the bias to the logits as they are"
        if abs(factor - 1) < 1e-6
        else f"multiplies the logits by {factor:.6g} before it adds the bias"
        for factor in factors
    ]
    case.add("softcap", place, words[0], words[1], graph.output, ratio=factors[1] / factors[0])
    return True


def _bias_before(
    case: Case, place: Place, heads: tuple[int, int], value: Tensor, ours: Tensor, theirs: Tensor
) -> bool:
    """A vector that one model adds to the logits in front of a cap that both have."""
    runs: list[Callable[[Tensor], Tensor | None]] = []
    for model, top in zip((case.a, case.b), heads, strict=True):

        def run(x: Tensor, model: Model = model, top: int = top) -> Tensor | None:
            graph, width = model.graph, x.shape[-1]
            out = graph.evaluate(graph.output, {top: graph.shaped(x, top, width)})
            return graph.canonical(out, width, graph.output)

        runs.append(run)
    for plain, other, wanted, adds in ((*runs, theirs, 1), (*reversed(runs), ours, 0)):
        zero = other(torch.zeros_like(value))
        cap = _cap_of(plain, value)
        if zero is None or cap is None or float(zero.abs().max()) >= cap:
            continue
        vector = cap * torch.atanh(zero[0, 0] / cap)
        found = plain(value + vector)
        if found is not None and gap(found, wanted) < 1e-6 and float(vector.abs().max()) > 1e-9:
            words = "adds no further vector to the logits", "adds one before their cap"
            size = float(vector.abs().max())
            case.add("output-bias", place, words[1 - adds], words[adds], case.b.graph.output, largest=size)
            return True
    return False


def _cap_of(run: Callable[[Tensor], Tensor | None], value: Tensor) -> float | None:
    """The c of c·tanh(x / c): what numbers come to that are far beyond it."""
    high, own = run(torch.full_like(value, 1e9)), run(value)
    if high is None or own is None or not bool(high.isfinite().all()):
        return None
    cap = float(high.max())
    return cap if 0 < cap < 1e8 and gap(cap * torch.tanh(value / cap), own) < 1e-6 else None


def _head(case: Case, first: bool) -> int | None:
    model = case.a if first else case.b
    output = model.graph.output
    tops = model.structure.tops(output)
    return tops[0] if len(tops) == 1 and tops[0] in model.structure.by_out else None


def _describe(x: Tensor, y: Tensor, factor: float = 1.0) -> str | None:
    if gap(x, y) < 1e-9:
        return "gives the logits as they are"
    ratio = float((x * y).sum() / x.square().sum())
    if gap(x * ratio, y) < 1e-6:
        return f"multiplies the logits by {ratio:.6g}"
    for before in (factor, 1.0, 0.5, 2.0):
        low, high = 1e-3, 1e4
        top = int(x.abs().argmax())
        p, q = float(x.reshape(-1)[top].abs()) * before, float(y.reshape(-1)[top].abs())
        for _ in range(200):
            middle = math.sqrt(low * high)
            if middle * math.tanh(p / middle) > q:
                high = middle
            else:
                low = middle
        cap = math.sqrt(low * high)
        if gap(cap * torch.tanh(x * before / cap), y) < 1e-5:
            return f"caps the logits at {cap:.4g}" + (
                "" if before == 1 else f" after multiplying them by {before:g}"
            )
    mean_x, mean_y = x - x.mean(-1, keepdim=True), y - y.mean(-1, keepdim=True)
    ratio = float((mean_x * mean_y).sum() / mean_x.square().sum())
    if abs(ratio - 1) > 1e-6 and gap((ratio * x).log_softmax(-1), y) < 1e-6:
        return f"gives the logarithm of the softmax of {ratio:.6g} times the logits"
    if gap(x.log_softmax(-1), y) < 1e-6:
        return "gives the logarithm of the softmax of the logits"
    if gap(x.softmax(-1), y) < 1e-6:
        return "gives the softmax of the logits"
    return None


def _shift(x: Tensor, y: Tensor) -> Tensor | None:
    """The vector that is added to logits in front of what takes no notice of a constant in all of them."""
    difference = y - y.mean(-1, keepdim=True) - x + x.mean(-1, keepdim=True)
    rows = difference.flatten(0, 1)
    return rows[0] if gap(rows, rows[:1].expand_as(rows)) < 1e-6 else None
