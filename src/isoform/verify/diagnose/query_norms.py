"""Norms on queries and keys: along which axis, before or after the rotation, with which gains."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isoform.verify.diagnose.case import Case
from isoform.verify.diagnose.cores import Core, allowed, columns_of
from isoform.verify.diagnose.rotations import centred, channels, images
from isoform.verify.diagnose.unary import gap

SQUARE = 1e-6
"""Off the diagonal below this, relative to it, columns are at right angles."""


def explain_norms(add: Any, case: Case, a: Core, b: Core) -> None:
    """Name the difference of two norms of queries and keys, both there."""
    reach_a, reach_b = (_all_heads(c) for c in (a, b))
    if reach_a != reach_b:
        words = {True: "normalises over all heads together", False: "normalises each head"}
        add("qk-norm", words[reach_a], words[reach_b])
        return
    eps = [_eps(core, reach_a) for core in (a, b)]
    if max(eps) > 1e-14 and min(eps) / max(eps) < 0.97:
        add("norm-eps", *(f"uses ε = {e:.3g}" for e in eps), reference=eps[0], candidate=eps[1])
    for which in ("q", "k"):
        one, two = images(a, which), images(b, which)
        if one is None or two is None or one.shape[-1] != two.shape[-1]:
            continue
        one, two = centred(one), centred(two)
        early_a, early_b = _before(one), _before(two)
        if None not in (early_a, early_b) and early_a != early_b:
            words = {True: "normalises before the rotation", False: "normalises after it"}
            add("qk-norm", words[bool(early_a)], words[bool(early_b)])
            return
        gains = [_gains(m, early_a is not False) for m in (one, two)]
        gains[0] = gains[0][channels(case, a, b, which)]
        ratio = float((gains[0] * gains[1]).sum() / gains[0].square().sum())  # the scale of the scores
        if gap(ratio * gains[0], gains[1]) > 1e-6:
            x, y = (g - g.mean() for g in gains)
            slope = float((x * y).sum() / x.square().sum().clamp(min=1e-30))
            if slope > 0 and len(x) > 2 and gap(slope * x, y) < 1e-5:
                words = {True: "multiplies by 1 + w", False: "multiplies by w"}
                more = float(gains[1].mean()) > slope * float(gains[0].mean())
                add("norm-offset", words[not more], words[more])
            else:
                name = "queries" if which == "q" else "keys"
                add("qk-norm", f"multiplies {name} by one gain", "multiplies them by another")
            return


def normed_scale(core: Core) -> float | None:
    """What the product of a normalised query and a normalised key, gains included, is multiplied by.

    None: it is not queries and keys of one head, normalised and perhaps turned afterwards, that meet.
    """
    factors = [_size(core, which) for which in ("q", "k")]
    q, k = (core.operand(which, core.given()) for which in ("q", "k"))
    base = core.logits(core.given(q=0.0))
    scores = core.logits(core.given()) - base
    if None in factors or scores.shape[:2] != q.shape[:2]:
        return None
    fine = allowed(base) & scores.isfinite()
    found: list[float] = []
    for head in range(q.shape[1]):
        for other in k.unbind(1):  # which of them it reads is another question
            raw, got = q[:, head] @ other.transpose(-1, -2), scores[:, head]
            raw, got = raw[fine[:, head]], got[fine[:, head]]
            ratio = float((raw * got).sum() / raw.square().sum().clamp(min=1e-30))
            if ratio > 0 and gap(raw * ratio, got) < 1e-4:
                found.append(ratio)
                break
    whole = len(found) == q.shape[1] and max(found) - min(found) < 1e-4 * max(found)
    return found[0] * factors[0] * factors[1] if whole else None  # type: ignore[operator]


def _size(core: Core, which: str) -> float | None:
    """What normalised heads are multiplied by beside their gain, which is one of the model's parameters."""
    value, columns = core.inputs[which], columns_of(core, which)
    operand = core.operand(which, core.given())
    columns = columns[:: max(1, len(columns) // operand.shape[1])]
    if len({len(c) for c in columns}) != 1 or operand.shape[1] != len(columns):
        return None
    heads = torch.stack([value[..., c] for c in columns], 1)
    plain = torch.ones(heads.shape[-1], dtype=heads.dtype)
    if operand.shape != heads.shape:
        return None
    parameters = core.model.parameters.values()
    own = [v.double() for v in parameters if v.shape == plain.shape and v.is_floating_point()]
    for x in (heads, heads - heads.mean(-1, keepdim=True)):
        normed = x * x.square().mean(-1, keepdim=True).rsqrt()
        for gain in (*own, *(1 + v for v in own), plain):
            ratio = operand.norm(dim=-1) / (normed * gain).norm(dim=-1)
            if float(ratio.std()) < 1e-4 * float(ratio.mean()):  # ε is hardly seen
                return float(ratio.median())
    return None


def _eps(core: Core, whole: bool) -> float:
    """What keeps the norm of queries finite: they are shrunk until it shows."""
    columns, value = columns_of(core, "q"), core.inputs["q"]
    heads = [value] * len(columns) if whole else [value[..., c] for c in columns]
    bias = core.operand("q", core.put("q", torch.zeros_like(value)))

    def size_of(x: Tensor) -> Tensor:
        return (core.operand("q", core.put("q", x)) - bias).norm(dim=-1)

    moved = value + 10 * value.abs().max()
    if gap(size_of(1e6 * value), size_of(1e6 * moved)) < 1e-5:  # a mean is subtracted
        heads = [h - h.mean(-1, keepdim=True) for h in heads]
    power = torch.stack([h.square().mean(-1) for h in heads], 1)  # [B, heads, T]
    full = size_of(1e6 * value)
    for exponent in range(17):
        size = 10.0 ** (-exponent / 2)
        share = size_of(size * value) / full
        fine = share.isfinite() & (share > 0.05) & (share < 0.97)
        if bool(fine.any()):
            return float((size**2 * power * (1 / share.square() - 1))[fine].median())
    return 0.0


def _before(matrix: Tensor) -> bool | None:
    """Whether gains come before the rotation; None: either would do, or neither."""
    columns, rows = matrix.transpose(-1, -2) @ matrix, matrix @ matrix.transpose(-1, -2)
    square = [_diagonal(m) for m in (columns, rows)]
    return None if square[0] == square[1] else square[0]


def _diagonal(gram: Tensor) -> bool:
    own = gram.diagonal(dim1=-2, dim2=-1)
    return float((gram - own.diag_embed()).abs().max()) < SQUARE * float(own.max())


def _gains(matrix: Tensor, early: bool) -> Tensor:
    """The gains of the first head: rotations keep the size of a unit vector's image, or of a row.

    Their signs are those of the first position, that most rotations leave where it is.
    """
    first = matrix[0, 0, 0]
    size = first.norm(dim=0 if early else 1) / matrix.shape[-1] ** 0.5
    return torch.where(first.diagonal() < 0, -size, size)


def _all_heads(core: Core) -> bool:
    """Whether a head's query depends on other heads' channels."""
    q = core.inputs["q"]
    half = q.clone()
    half[..., : q.shape[-1] // 2] *= 3.0
    before, after = core.operand("q", core.given()), core.operand("q", core.put("q", half))
    return gap(before[:, -1], after[:, -1]) > 1e-9
