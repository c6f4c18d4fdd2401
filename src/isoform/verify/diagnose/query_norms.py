"""Norms on queries and keys: along which axis, before or after the rotation, with which gains."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isoform.verify.diagnose.case import Case
from isoform.verify.diagnose.cores import Core, columns_of
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


def _eps(core: Core, whole: bool) -> float:
    """What keeps the norm of queries finite: they are shrunk until it shows."""
    columns, value = columns_of(core, "q"), core.inputs["q"]
    heads = [value] * len(columns) if whole else [value[..., c] for c in columns]
    power = torch.stack([h.square().mean(-1) for h in heads], 1)  # [B, heads, T]
    full = core.operand("q", core.put("q", 1e6 * value)).norm(dim=-1)
    for exponent in range(17):
        size = 10.0 ** (-exponent / 2)
        share = core.operand("q", core.put("q", size * value)).norm(dim=-1) / full
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
