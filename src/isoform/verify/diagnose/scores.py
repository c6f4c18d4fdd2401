"""How scores come from queries and keys: scale, cap, rotation, norm, and which heads meet."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from isoform.verify.diagnose.case import Case
from isoform.verify.diagnose.cores import Core, allowed, biased_norm, columns_of, shared_heads
from isoform.verify.diagnose.query_norms import explain_norms, normed_scale
from isoform.verify.diagnose.report import Place
from isoform.verify.diagnose.rotations import explain_turns, turning
from isoform.verify.diagnose.unary import gap

SMALL = 1e-4

BENT = "bends large scores in a way of its own"


def explain_scores(
    case: Case, place: Place, a: Core, b: Core, base_a: Tensor, base_b: Tensor, both: Tensor, heads: Tensor
) -> None:
    """Compare the parts of the scores that come from queries and keys."""

    def add(kind: str, x: str, y: str, **evidence: Any) -> None:
        case.add(kind, place, x, y, b.site.scores, **evidence)

    def scores(core: Core, base: Tensor, **factors: float) -> Tensor:
        value = core.logits(core.given(**factors))
        value = torch.where(value.isfinite(), value, 0.0)
        return torch.where(both, value - base, 0.0)

    one, two = scores(a, base_a)[:, heads], scores(b, base_b)
    if gap(one, two) <= case.tolerance:
        return
    normed_a, normed_b = _normed(scores, a, base_a), _normed(scores, b, base_b)

    def small(core: Core, base: Tensor, normed: bool) -> Tensor:
        """Scores too small for a cap; normalised queries are made small behind their norm."""
        if not normed:
            return scores(core, base, q=SMALL) / SMALL
        given = core.given()
        query = SMALL * core.model.graph.evaluate(core.site.query, given)
        value = core.logits({**given, core.site.query: query})
        return torch.where(both, torch.where(value.isfinite(), value, 0.0) - base, 0.0) / SMALL

    small_a, small_b = small(a, base_a, normed_a)[:, heads], small(b, base_b, normed_b)
    cap_a, cap_b = _cap(one, small_a), _cap(two, small_b)
    own = [_bent(x, y) and cap is None for x, y, cap in ((one, small_a, cap_a), (two, small_b, cap_b))]
    if own[0] != own[1] and not normed_a and not normed_b:  # a norm with a bias bends them too
        words = [BENT if bent else _capped(cap) for bent, cap in zip(own, (cap_a, cap_b), strict=True)]
        add("unexplained", *words, reference=cap_a, candidate=cap_b)
        if gap(small_a, small_b) <= max(2e-5, case.tolerance):
            return
    elif (cap_a or cap_b) and not _same_cap(cap_a, cap_b):
        add("softcap", _capped(cap_a), _capped(cap_b), reference=cap_a, candidate=cap_b)
        if gap(small_a, small_b) <= max(2e-5, case.tolerance):
            return
    elif gap(small_a, small_b) <= max(2e-5, case.tolerance):
        add("unexplained", "bends large scores in one way", "bends them in another")
        return
    groups = shared_heads(case, a, b, "k")
    if groups is not None:
        add("kv-head-order", *groups, heads="keys")
    if normed_a != normed_b:
        words = ("normalises queries and keys", "does not normalise them")
        add("qk-norm", words[not normed_a], words[not normed_b])
    if groups is not None or normed_a != normed_b:
        beside(add, case, a, b)
        return
    ratio = _ratio(small_a, small_b, both, max(1e-5, case.constants))
    if ratio is not None:
        add("attention-scale", *_scales(a, b, ratio), ratio=ratio)
        return
    count = len(case.raw)
    if normed_a and normed_b:
        explain_norms(add, case, a, b)
    turn_a, turn_b = turning(a), turning(b)
    if turn_a is not None and turn_b is not None:
        explain_turns(add, case, a, b, turn_a, turn_b)
        if len(case.raw) > count and all(raw.kind != "qk-norm" for raw in case.raw[count:]):
            _scale_beside(add, a, b, small_a, small_b, both)
    if len(case.raw) > count:
        return
    if _by_distance(a, b, one, two, both, heads):
        words = "adds to a score what its query gives for the distance", "adds another term to it"
        add("relative-bias", *words)
        return
    add(
        "unexplained",
        "computes scores in one way",
        "computes them in another",
        relative_difference=gap(one, two),
    )


def _by_distance(a: Core, b: Core, one: Tensor, two: Tensor, both: Tensor, heads: Tensor) -> bool:
    """Whether all that differs is what scores hold of the queries alone."""
    alone: list[Tensor] = []
    for core in (a, b):
        value = core.logits(core.given(k=0.0)) - core.logits(core.given(q=0.0, k=0.0))
        alone.append(torch.where(both & value.isfinite(), value, 0.0))
    ours = alone[0][:, heads]
    size = max(float(one.abs().max()), float(two.abs().max()))
    most = max(float(x.abs().max()) for x in (ours, alone[1]))
    return most > 1e-6 * size and gap(one - ours, two - alone[1]) <= 1e-6


def beside(add: Any, case: Case, a: Core, b: Core) -> None:
    """Scale and rotation, each model's by itself, where the scores cannot be compared any more."""
    scales, near = [measured_scale(core) for core in (a, b)], 1e-5
    if None in scales:
        scales, near = [own or normed_scale(core) for own, core in zip(scales, (a, b), strict=True)], 1e-3
    one, two = scales
    if one is not None and two is not None and abs(two / one - 1) > near:
        words = f"scales scores by {_named(one, a)}", f"scales them by {_named(two, b)}"
        add("attention-scale", *words, ratio=two / one)
    if biased_norm(a) or biased_norm(b):
        return  # a norm's bias is not turned as what it is added to
    turn_a, turn_b = turning(a), turning(b)
    if turn_a is not None and turn_b is not None:
        explain_turns(add, case, a, b, turn_a, turn_b)


def _scale_beside(add: Any, a: Core, b: Core, small_a: Tensor, small_b: Tensor, both: Tensor) -> None:
    """A wrong scale beside a wrong rotation shows where query and key stand at the same place."""
    size = min(small_a.shape[-2:])
    own = torch.arange(size)
    ratio = _ratio(small_a[..., own, own], small_b[..., own, own], both[..., own, own])
    if ratio is not None and abs(ratio - 1) > 1e-5:
        add("attention-scale", *_scales(a, b, ratio), ratio=ratio)


def _normed(scores: Any, core: Core, base: Tensor) -> bool:
    """Twice the query, the same score: the query is normalised."""
    one, two = scores(core, base, q=1e4), scores(core, base, q=2e4)
    return (
        float(one.abs().max()) > 0
        and gap(one, two) < 1e-5
        and gap(one, scores(core, base, q=1.0) * 1.0) < 0.2
    )


def _ratio(a: Tensor, b: Tensor, both: Tensor, tolerance: float = 1e-5) -> float | None:
    x, y = a[both], b[both]
    if not len(x) or float(x.square().sum()) == 0:
        return None
    ratio = float((x * y).sum() / x.square().sum())
    return ratio if ratio != 0 and gap(x * ratio, y) < tolerance else None


def _scales(a: Core, b: Core, ratio: float) -> tuple[str, str]:
    scale = measured_scale(a)
    if scale is None:
        return "scales scores by 1 (relatively)", f"scales them by {ratio:.4g} of that"
    return f"scales scores by {_named(scale, a)}", f"scales them by {_named(scale * ratio, a)}"


def _named(scale: float, core: Core) -> str:
    width, heads = core.width, core.heads
    forms = {
        "1/√d_head": width**-0.5,
        "1": 1.0,
        "1/√d_model": (width * heads) ** -0.5,
        "1/√heads": heads**-0.5,
        "1/d_head": 1 / width,
        "√d_head": width**0.5,
    }
    known = next((f"{v:.4g} = {n}" for n, v in forms.items() if abs(v / scale - 1) < 1e-5), "")
    return known or f"{scale:.4g}"


def measured_scale(core: Core) -> float | None:
    """Score per q·k where both stand at the same place, from the columns that each head reads."""
    q, k = columns_of(core, "q"), columns_of(core, "k")
    if len(q) != len(k) or [len(c) for c in q] != [len(c) for c in k]:
        return None
    base = core.logits(core.given(q=0.0))
    got = (core.logits(core.given(q=SMALL)) - base) / SMALL
    queries, keys = core.inputs["q"], core.inputs["k"]
    raw = torch.stack(
        [queries[..., cq] @ keys[..., ck].transpose(-1, -2) for cq, ck in zip(q, k, strict=True)], 1
    )
    if raw.shape != got.shape:
        return None
    fine = got.isfinite() & allowed(base)
    if not core.site.cross:  # rotations let the scores of a place with itself alone as they are
        fine = fine & torch.eye(*fine.shape[-2:], dtype=torch.bool)
    ratio = float((raw[fine] * got[fine]).sum() / raw[fine].square().sum())
    return ratio if ratio > 0 and gap(raw[fine] * ratio, got[fine]) < 1e-4 else None


def _cap(full: Tensor, small: Tensor) -> float | None:
    """The cap c of c·tanh(s / c), if scores are bent like that."""
    if not _bent(full, small):
        return None
    low, high = 1e-3, 1e4
    x, y = small.abs().reshape(-1), full.abs().reshape(-1)
    top = int(x.argmax())
    for _ in range(200):
        middle = math.sqrt(low * high)
        if middle * math.tanh(float(x[top]) / middle) > float(y[top]):
            high = middle
        else:
            low = middle
    cap = math.sqrt(low * high)
    return cap if gap(cap * torch.tanh(small / cap), full) < 1e-3 else None


def _bent(full: Tensor, small: Tensor) -> bool:
    return gap(full, small) >= 1e-6


def _same_cap(a: float | None, b: float | None) -> bool:
    return a is not None and b is not None and abs(a / b - 1) < 1e-3


def _capped(cap: float | None) -> str:
    return "does not cap scores" if cap is None else f"caps scores at {cap:.4g}"
