"""What is added to scores beside queries times keys: slopes, biases by distance, additive masks."""

from __future__ import annotations

import torch
from torch import Tensor

from isoform.verify.diagnose.case import Case
from isoform.verify.diagnose.cores import Core
from isoform.verify.diagnose.report import Place
from isoform.verify.diagnose.unary import gap


def explain_bias(
    case: Case,
    place: Place,
    a: Core,
    b: Core,
    base_a: Tensor,
    base_b: Tensor,
    both: Tensor,
    keys: Tensor,
) -> None:
    """Name the difference of what is added to scores ``[B, heads, T, S]``, but for constants in a row."""
    if same_bias(base_a, base_b, both):
        return
    one, two = _centred(base_a, both), _centred(base_b, both)
    size = torch.maximum(one.abs().max(), two.abs().max())
    order = b.site.scores
    none_a, none_b = bool(one.abs().max() < 1e-9), bool(two.abs().max() < 1e-9)
    slope_a, slope_b = _slopes(base_a, both), _slopes(base_b, both)
    padded = ~keys[:, None, None, :].expand_as(both) & both
    flat = torch.where(padded, 0.0, base_b - base_a)
    if bool(padded.any()) and gap(_centred(flat, both & ~padded), torch.zeros_like(flat)) <= 1e-6 * float(
        size
    ):
        case.add("mask-polarity", place, *_additive(base_a, base_b, padded), order)
        return
    if slope_a is not None and slope_b is not None and not none_a and not none_b:
        case.add(
            "alibi-slope",
            place,
            f"lowers scores by {_list(slope_a)} per position and head",
            f"lowers them by {_list(slope_b)}",
            order,
        )
        return
    if (none_a and slope_b is not None) or (none_b and slope_a is not None):
        kind = "alibi-slope"
    else:
        kind = "relative-bias"
    straight = slope_a is not None, slope_b is not None
    bent = straight[0] != straight[1] and not none_a and not none_b
    if bent:
        kind = "unexplained"
    elif not _relative(base_a, both) or not _relative(base_b, both):
        kind = "relative-bias" if _by_keys(a, b, one - two, both) else "unexplained"
    words = "adds a bias by distance to the scores", "adds none to the scores"
    if not none_a and not none_b:
        mirrored = gap(one, _mirror(base_b, both)) < 1e-6
        case.add(
            kind, place, words[0], "mirrors it" if mirrored else "adds another one", order, of=b.site.index
        )
    else:
        case.add(kind, place, words[none_a], words[none_b], order, of=b.site.index)


def same_bias(a: Tensor, b: Tensor, both: Tensor) -> bool:
    """Whether two biases ``[B, heads, T, S]`` are one, but for constants in a row."""
    one, two = _centred(a, both), _centred(b, both)
    return float(torch.maximum(one.abs().max(), two.abs().max())) < 1e-9 or gap(one, two) <= 1e-6


def scaled_as_a_whole(
    a: Core, b: Core, base_a: Tensor, base_b: Tensor, both: Tensor, ratio: float, heads: Tensor
) -> bool:
    """Whether a ratio of scores explains their biases too: of all that is added, or of what keys give."""
    bare = torch.where(both, a.logits(a.given(q=0.0, k=0.0)), 0.0)
    bare_b = torch.where(both, b.logits(b.given(q=0.0, k=0.0)), 0.0)
    bare, base_a = bare[:, heads], base_a[:, heads]
    rest = same_bias(bare, bare_b, both) and same_bias(ratio * (base_a - bare) + bare, base_b, both)
    return rest or same_bias(ratio * base_a, base_b, both)


def _by_keys(a: Core, b: Core, difference: Tensor, both: Tensor) -> bool:
    """Whether all that differs is what keys give by their distance to the query."""
    bare = [torch.where(both, c.logits(c.given(q=0.0, k=0.0)), 0.0) for c in (a, b)]
    size = difference.abs().max()
    same = gap(_centred(bare[0], both), _centred(bare[1], both)) <= 1e-6
    shared = both.all(2)[:, :, None].expand_as(both)  # keys that every query reads
    spread = torch.where(shared, difference, 0.0)
    alike = bool(((spread - spread[:, :, :1]).abs() <= 1e-6 * size).all())
    return same and not alike


def _additive(a: Tensor, b: Tensor, padded: Tensor) -> tuple[str, str]:
    def said(x: Tensor) -> str:
        size = float(x[padded].abs().max())
        return f"adds {size:.3g} to scores by the padding mask" if size else "adds nothing to them"

    return said(a), said(b)


def _mirror(base: Tensor, both: Tensor) -> Tensor:
    return _centred(base.transpose(-1, -2), both) if base.shape[-1] == base.shape[-2] else base


def _centred(base: Tensor, both: Tensor) -> Tensor:
    count = both.sum(-1, keepdim=True).clamp(min=1)
    mean = torch.where(both, base, 0.0).sum(-1, keepdim=True) / count
    return torch.where(both, base - mean, 0.0)


def _slopes(base: Tensor, both: Tensor) -> Tensor | None:
    """Per head the loss per position of distance, where the bias is linear in it."""
    rows, columns = base.shape[-2:]
    signed = (torch.arange(columns)[None] - torch.arange(rows)[:, None]).double().expand_as(base)
    value = _centred(base, both)
    for distance in (-signed.abs(), signed):
        far = _centred(distance, both)
        slope = (far * value).sum((0, 2, 3)) / far.square().sum((0, 2, 3)).clamp(min=1e-30)
        if gap(far * slope[:, None, None], value) <= 1e-5:
            return slope
    return None


def _relative(base: Tensor, both: Tensor) -> bool:
    """Whether a bias depends on distance alone (up to a constant in a row)."""
    if base.shape[-1] != base.shape[-2]:
        return True
    value = torch.where(both, base, 0.0)
    diagonals: dict[int, Tensor] = {}
    step = value[..., 1:] - value[..., :-1]
    fine = both[..., 1:] & both[..., :-1]
    for offset in range(-step.shape[-2] + 1, step.shape[-1]):
        d, m = torch.diagonal(step, offset, -2, -1), torch.diagonal(fine, offset, -2, -1)
        for head in range(d.shape[1]):
            inside = d[:, head][m[:, head]]
            if len(inside) and float(inside.max() - inside.min()) > 1e-6 * float(
                value.abs().max().clamp(min=1e-9)
            ):
                return False
    del diagonals
    return True


def _list(values: Tensor) -> str:
    return ", ".join(f"{float(v):.4g}" for v in values[:8]) + (" …" if len(values) > 8 else "")
