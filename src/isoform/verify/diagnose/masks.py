"""Which keys a query may read, and what is added to the scores, in one model and in the other."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from isoform.verify.diagnose.case import Case
from isoform.verify.diagnose.cores import Core
from isoform.verify.diagnose.report import Place
from isoform.verify.diagnose.unary import gap


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A visibility in words.

    Args:
        ahead: how many real keys after itself a query reads at most.
        behind: how many real keys before itself it reads at most.
        padding: share of padded keys it reads.
        real: share of the real keys up to itself that it reads.
    """

    ahead: int
    behind: int
    padding: float
    real: float


def explain_mask(
    case: Case, place: Place, a: Core, b: Core, open_a: Tensor, open_b: Tensor, queries: Tensor, keys: Tensor
) -> None:
    """Name the difference of two visibilities ``[B, heads, T, S]``."""
    seen = queries[:, None, :, None].expand_as(open_a)
    if bool((open_a == open_b)[seen].all()):
        return
    order, cross = b.site.scores, a.site.cross
    one, two = _pattern(open_a, queries, keys, cross), _pattern(open_b, queries, keys, cross)
    length = open_a.shape[-1]

    def add(kind: str, x: str, y: str, **evidence: Any) -> None:
        evidence |= {"reference_allows": int(open_a[seen].sum()), "candidate_allows": int(open_b[seen].sum())}
        case.add(kind, place, x, y, order, **evidence)

    rolled = [k for k in range(1, len(open_a)) if torch.equal(open_a.roll(k, 0), open_b)]
    if rolled:
        add(
            "cross-mask" if cross else "mask-polarity",
            "masks by a row's own padding",
            "masks by another row's",
        )
        return
    count = len(case.raw)
    if 0 in (one.real, two.real) and one.real != two.real and one.padding == two.padding:
        words = "reads the real tokens", "reads none of the real tokens"
        add("cross-mask" if cross else "mask-polarity", words[one.real == 0], words[two.real == 0])
        return
    if abs(one.padding - two.padding) > 1e-9 or (
        abs(one.real - two.real) > 0.3 and one.padding != two.padding
    ):
        kind = "cross-mask" if cross else "mask-polarity"
        add(kind, _padding(one), _padding(two))
    if not cross and _apart(open_a, open_b, queries, keys):
        words = "keeps the documents of a row apart", "lets documents of a row read each other"
        more = bool((open_b & ~open_a & seen).any())
        add("document-leak", words[not more], words[more])
    elif not cross and min(one.real, two.real) > 0.3:
        ahead = _ahead(one, two, length)
        behind = one.behind != two.behind and (one.ahead == two.ahead or min(one.behind, two.behind) > 0)
        if behind and ahead == "sliding-window":  # one window, to both sides
            add(ahead, *(f"{_ahead_words(x, length)} and {_behind(x, length)}" for x in (one, two)))
            return
        if ahead is not None:
            add(ahead, _ahead_words(one, length), _ahead_words(two, length))
        if behind:
            add("sliding-window", _behind(one, length), _behind(two, length))
    if len(case.raw) == count:
        strict = open_a & ~open_b & seen
        loose = ~open_a & open_b & seen
        first = (loose if loose.any() else strict).nonzero()[0].tolist()
        kind = "unexplained"
        where = f"query {first[2]} in row {first[0]}, head {first[1]}"
        reads = "reads" if loose.any() else "does not read"
        other = "does not read" if loose.any() else "reads"
        add(
            kind,
            f"{other} key {first[3]} at {where}",
            f"{reads} it",
            query=first[2],
            key=first[3],
            row=first[0],
        )


def _ahead(one: Pattern, two: Pattern, length: int) -> str | None:
    """What it is called that they read another number of later positions; None: they don't."""
    if one.ahead == two.ahead:
        return None
    low, high = sorted((one.ahead, two.ahead))
    if low > 0 and one.padding != two.padding:
        return None  # which keys are real is what differs
    if 0 < high < length - 2 and low == 0 and high > 1:
        return "causal-alignment"
    return "causality" if low <= 0 else "sliding-window"


def _ahead_words(pattern: Pattern, length: int) -> str:
    if pattern.ahead <= 0:
        return "reads no later position"
    return (
        "reads every later position"
        if pattern.ahead >= length - 2
        else f"reads up to {pattern.ahead} positions ahead"
    )


def _behind(pattern: Pattern, length: int) -> str:
    if pattern.behind >= length - 1:
        return "reads all earlier positions"
    return f"reads back over {pattern.behind + 1} positions, its own included"


def _padding(pattern: Pattern) -> str:
    if pattern.padding == 0:
        return "does not read padding"
    return "reads padding and not the real tokens" if pattern.real < 0.5 else "reads padding"


def _pattern(allowed: Tensor, queries: Tensor, keys: Tensor, cross: bool) -> Pattern:
    batch, _, rows, columns = allowed.shape
    far = torch.arange(columns)[None] - torch.arange(rows)[:, None] - (0 if cross else columns - rows)
    real = keys[:, None, None, :].expand_as(allowed)
    ask = queries[:, None, :, None].expand_as(allowed)
    reads = allowed & real & ask
    distance = far.expand_as(allowed)
    ahead = int(distance[reads].max()) if bool(reads.any()) else 0
    behind = int((-distance[reads]).max()) if bool(reads.any()) else 0
    padded = ~real & ask & ((distance <= max(ahead, 0)) | cross)
    own = real & ask & ((distance <= 0) | cross)
    padding = float(allowed[padded].double().mean()) if bool(padded.any()) else 0.0
    share = float(allowed[own].double().mean()) if bool(own.any()) else 0.0
    del batch
    return Pattern(ahead, behind, round(padding, 6), share)


def _apart(a: Tensor, b: Tensor, queries: Tensor, keys: Tensor) -> bool:
    """Whether the two masks are one and the same but for a division of rows into documents."""
    size = a.shape[-1]
    if a.shape[-2] != size or size < 2:
        return False
    asked = (queries[:, None, :, None] & keys[:, None, None, :]).expand_as(a)
    narrow, wide = (a, b) if bool((b & ~a & asked).any()) else (b, a)
    own = torch.arange(1, size)
    pair = queries[:, 1:] & keys[:, :-1]
    starts = (narrow[:, :, own, own] & ~narrow[:, :, own, own - 1] & wide[:, :, own, own - 1]).all(1) & pair
    if not bool(starts.any()):
        return False
    document = torch.cat([starts.new_zeros(len(starts), 1), starts], 1).cumsum(1)
    same = (document[:, :, None] == document[:, None, :])[:, None]
    return bool((narrow == wide & same)[asked].all())


def explain_bias(
    case: Case,
    place: Place,
    a: Core,
    b: Core,
    base_a: Tensor,
    base_b: Tensor,
    both: Tensor,
    queries: Tensor,
    keys: Tensor,
) -> None:
    """Name the difference of what is added to scores ``[B, heads, T, S]``, but for constants in a row."""
    del queries
    one, two = _centred(base_a, both), _centred(base_b, both)
    size = torch.maximum(one.abs().max(), two.abs().max())
    if float(size) < 1e-9 or gap(one, two) <= 1e-6:
        return
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
    if bent or not _relative(base_a, both) or not _relative(base_b, both):
        kind = "unexplained"
    words = "adds a bias by distance to the scores", "adds none to the scores"
    if not none_a and not none_b:
        mirrored = gap(one, _mirror(base_b, both)) < 1e-6
        case.add(kind, place, words[0], "mirrors it" if mirrored else "adds another one", order)
    else:
        case.add(kind, place, words[none_a], words[none_b], order)


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
