"""Which keys a query may read, in one model and in the other."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from isoform.verify.diagnose.case import Case
from isoform.verify.diagnose.cores import Core
from isoform.verify.diagnose.report import Place


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A visibility in words.

    Args:
        ahead: how many real keys after itself a query reads at most.
        behind: how many real keys before itself it reads at most.
        padding: share of padded keys it reads.
        real: share of the real keys up to itself, and no further back than it reads, that it reads.
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
        if _prefixes(add, open_a, open_b, queries, keys):
            return
        wide = open_a if one.ahead > two.ahead else open_b
        ahead = _ahead(one, two, length, _prefix(wide, queries, keys) is not None)
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


def join_windows(case: Case) -> None:
    """Windows that the models have in each other's layers are one deviation."""
    found = [r for r in case.raw if r.kind == "sliding-window"]
    pairs = {(r.reference, r.candidate) for r in found}
    turned = sorted(p for p in pairs if p[::-1] in pairs)
    if len(turned) != 2:
        return
    layers = [sorted({str(r.place.layer) for r in found if (r.reference, r.candidate) == p}) for p in turned]
    narrow = min(turned[0], key=lambda words: "all earlier" in words)
    words = [f"{narrow}, in layers {', '.join(layers[turned[k][0] != narrow])}" for k in (0, 1)]
    for raw in found:
        if (raw.reference, raw.candidate) in turned:
            raw.reference, raw.candidate = words


def _ahead(one: Pattern, two: Pattern, length: int, prefix: bool) -> str | None:
    """What it is called that they read another number of later positions; None: they don't."""
    if one.ahead == two.ahead:
        return None
    low, high = sorted((one.ahead, two.ahead))
    if low > 0 and one.padding != two.padding:
        return None  # which keys are real is what differs
    wide = one if one.ahead > two.ahead else two
    both_sides = 0 < wide.ahead == wide.behind < length - 1
    if low <= 0 and both_sides and one.behind != two.behind:
        return None  # the window lies elsewhere
    if 0 < high < length - 2 and low == 0 and high > 1 and not (both_sides or prefix):
        return "causal-alignment"
    return "causality" if low <= 0 else "sliding-window"


def _prefixes(add: Any, a: Tensor, b: Tensor, queries: Tensor, keys: Tensor) -> bool:
    """Name a prefix that is read from everywhere, where it is another one or none."""
    one, two = _prefix(a, queries, keys), _prefix(b, queries, keys)
    if one is None or two is None or one == two:
        return False

    def said(found: list[int]) -> str:
        if max(found) <= 1:
            return "reads no later position"
        if all(n >= int(real.sum()) for n, real in zip(found, keys, strict=True)):
            return "reads every later position"
        return f"reads ahead within the first {', '.join(map(str, found))} positions of its rows"

    if not {"reads no later position", "reads every later position"} >= {said(one), said(two)}:
        add("causality", said(one), said(two))
        return True
    return False


def _prefix(allowed: Tensor, queries: Tensor, keys: Tensor) -> list[int] | None:
    """For each row how many positions at its start every query reads beside those before itself."""
    if allowed.shape[-1] != allowed.shape[-2] or not bool((allowed == allowed[:, :1]).all()):
        return None
    seen, place = allowed[:, 0], torch.arange(allowed.shape[-1])
    asked = queries[:, :, None] & keys[:, None, :]
    first = [int(rows.nonzero()[0]) if bool(rows.any()) else 0 for rows in queries]
    found = [int((seen[i, q] & keys[i]).sum()) for i, q in enumerate(first)]
    ends = torch.tensor([q + n for q, n in zip(first, found, strict=True)])
    form = (place[None, :, None] >= place[None, None]) | (place[None, None] < ends[:, None, None])
    return found if bool((seen == form)[asked].all()) else None


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
    rows, columns = allowed.shape[-2:]
    far = torch.arange(columns)[None] - torch.arange(rows)[:, None] - (0 if cross else columns - rows)
    real = keys[:, None, None, :].expand_as(allowed)
    ask = queries[:, None, :, None].expand_as(allowed)
    reads = allowed & real & ask
    distance = far.expand_as(allowed)
    ahead = int(distance[reads].max()) if bool(reads.any()) else 0
    behind = int((-distance[reads]).max()) if bool(reads.any()) else 0
    padded = ~real & ask & ((distance <= max(ahead, 0)) | cross)
    own = real & ask & (((distance <= 0) & (distance >= -behind)) | cross)
    padding = float(allowed[padded].double().mean()) if bool(padded.any()) else 0.0
    share = float(allowed[own].double().mean()) if bool(own.any()) else 0.0
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
