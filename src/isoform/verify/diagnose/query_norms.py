"""Norms on queries and keys: along which axis, before or after the rotation, with which gains."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from isoform.verify.diagnose.cores import Core
from isoform.verify.diagnose.rotations import images
from isoform.verify.diagnose.unary import gap

SQUARE = 1e-6
"""Off the diagonal below this, relative to it, columns are at right angles."""


def explain_norms(add: Any, a: Core, b: Core) -> None:
    """Name the difference of two norms of queries and keys, both there."""
    reach_a, reach_b = (_all_heads(c) for c in (a, b))
    if reach_a != reach_b:
        words = {True: "normalises over all heads together", False: "normalises each head"}
        add("qk-norm", words[reach_a], words[reach_b])
        return
    for which in ("q", "k"):
        one, two = images(a, which), images(b, which)
        if one is None or two is None or one.shape[-1] != two.shape[-1]:
            continue
        early_a, early_b = _before(one), _before(two)
        if None not in (early_a, early_b) and early_a != early_b:
            words = {True: "normalises before the rotation", False: "normalises after it"}
            add("qk-norm", words[bool(early_a)], words[bool(early_b)])
            return
        gains = [_gains(m) for m in (one, two)]
        if early_a is None and early_b is None and gap(*gains) > 1e-6:
            offset = gains[1] - gains[0]
            if abs(abs(float(offset.mean())) - 1) < 1e-5 and float(offset.std()) < 1e-5:
                words = {True: "multiplies by 1 + w", False: "multiplies by w"}
                add("norm-offset", words[float(offset.mean()) < 0], words[float(offset.mean()) > 0])
            else:
                name = "queries" if which == "q" else "keys"
                add("qk-norm", f"multiplies {name} by one gain", "multiplies them by another")
            return


def _before(matrix: Tensor) -> bool | None:
    """Whether gains come before the rotation; None: either would do, or neither."""
    columns, rows = matrix.transpose(-1, -2) @ matrix, matrix @ matrix.transpose(-1, -2)
    square = [_diagonal(m) for m in (columns, rows)]
    return None if square[0] == square[1] else square[0]


def _diagonal(gram: Tensor) -> bool:
    own = gram.diagonal(dim1=-2, dim2=-1)
    return float((gram - own.diag_embed()).abs().max()) < SQUARE * float(own.max())


def _gains(matrix: Tensor) -> Tensor:
    """The size of each unit vector's image in the first head, where norm and rotation can be exchanged."""
    return matrix[0, 0, 0].norm(dim=0) / matrix.shape[-1] ** 0.5


def _all_heads(core: Core) -> bool:
    """Whether a head's query depends on other heads' channels."""
    q = core.inputs["q"]
    half = q.clone()
    half[..., : q.shape[-1] // 2] *= 3.0
    before, after = core.operand("q", core.given()), core.operand("q", core.put("q", half))
    return gap(before[:, -1], after[:, -1]) > 1e-9
