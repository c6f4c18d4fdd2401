"""How scores come from queries and keys: scale, cap, rotation, norm, and which heads meet."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from isoform.verify.diagnose.report import Place
from isoform.verify.diagnose.unary import gap

if TYPE_CHECKING:
    from isoform.verify.diagnose.attention import Core
    from isoform.verify.diagnose.case import Case

SMALL = 1e-4


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
    small_a, small_b = (scores(c, base, q=SMALL) / SMALL for c, base in ((a, base_a), (b, base_b)))
    small_a = small_a[:, heads]
    if normed_a or normed_b:
        small_a, small_b = one, two
    cap_a, cap_b = (
        None if n else _cap(x, s) for n, x, s in ((normed_a, one, small_a), (normed_b, two, small_b))
    )
    if not normed_a and not normed_b and (cap_a or cap_b) and not _same_cap(cap_a, cap_b):
        add("softcap", _capped(cap_a), _capped(cap_b), reference=cap_a, candidate=cap_b)
        if gap(small_a, small_b) <= case.tolerance * 10:
            return
    elif gap(small_a, small_b) <= case.tolerance * 10 and not (normed_a or normed_b):
        add("unexplained", "bends large scores in one way", "bends them in another")
        return
    groups = _groups(case, a, b)
    if groups is not None:
        add("kv-head-order", *groups, heads="keys")
    if normed_a != normed_b:
        words = ("normalises queries and keys", "does not normalise them")
        add("qk-norm", words[not normed_a], words[not normed_b])
    if groups is not None or normed_a != normed_b:
        _beside(add, case, a, b)
        return
    ratio = _ratio(small_a, small_b, both)
    if ratio is not None:
        add("attention-scale", *_scales(a, b, ratio), ratio=ratio)
        return
    turn_a, turn_b = turning(a), turning(b)
    if turn_a is not None and turn_b is not None:
        count = len(case.raw)
        explain_turns(add, case, a, b, turn_a, turn_b)
        if len(case.raw) > count:
            _scale_beside(add, a, b, small_a, small_b, both)
            return
    if normed_a and normed_b:
        add("qk-norm", *_order_words(case, a, b))
        return
    add(
        "unexplained",
        "computes scores in one way",
        "computes them in another",
        relative_difference=gap(one, two),
    )


def _beside(add: Any, case: Case, a: Core, b: Core) -> None:
    """Scale and rotation, each model's by itself, where the scores cannot be compared any more."""
    scale_a, scale_b = measured_scale(a), measured_scale(b)
    if scale_a is not None and scale_b is not None and abs(scale_b / scale_a - 1) > 1e-5:
        add("attention-scale", *_scales(a, b, scale_b / scale_a), ratio=scale_b / scale_a)
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


def _ratio(a: Tensor, b: Tensor, both: Tensor) -> float | None:
    x, y = a[both], b[both]
    if not len(x) or float(x.square().sum()) == 0:
        return None
    ratio = float((x * y).sum() / x.square().sum())
    return ratio if ratio != 0 and gap(x * ratio, y) < 1e-5 else None


def _scales(a: Core, b: Core, ratio: float) -> tuple[str, str]:
    scale = measured_scale(a)
    if scale is None:
        return "scales scores by 1 (relatively)", f"scales them by {ratio:.6g} of that"
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
    name = next((f" = {n}" for n, v in forms.items() if abs(v / scale - 1) < 1e-5), "")
    return f"{scale:.6g}{name}"


def measured_scale(core: Core) -> float | None:
    """Score per q·k where both stand at the same place, from the columns that each head reads."""
    from isoform.verify.diagnose.attention import allowed, columns_of

    q, k = columns_of(core, "q"), columns_of(core, "k")
    if q is None or k is None or len(q) != len(k) or [len(c) for c in q] != [len(c) for c in k]:
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
    if gap(full, small) < 1e-6:
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


def _same_cap(a: float | None, b: float | None) -> bool:
    return a is not None and b is not None and abs(a / b - 1) < 1e-3


def _capped(cap: float | None) -> str:
    return "does not cap scores" if cap is None else f"caps scores at {cap:.4g}"


def _groups(case: Case, a: Core, b: Core) -> tuple[str, str] | None:
    from isoform.verify.diagnose.attention import _groups as groups  # pyright: ignore[reportPrivateUsage]

    return groups(case, a, b, "k")


@dataclasses.dataclass(eq=False)
class Turning:
    """A rotation of queries by position.

    Attributes:
        angle: ``[B, T, pairs]`` how far each pair of channels is turned, of the first head.
        by_head: whether heads turn differently.
        pairs: which channels form a pair.
        width: channels of a head.
    """

    angle: Tensor
    by_head: bool
    pairs: list[tuple[int, int]]
    width: int

    @property
    def pairing(self) -> str:
        """ "half", "interleaved" or "other"."""
        if not self.pairs:
            return "none"
        n = len(self.pairs)
        first = self.pairs[0][0]
        if all(j == i + 1 and (i - first) % 2 == 0 for i, j in self.pairs):
            return (
                "interleaved" if n > 1 or (self.pairs[0][1] == first + 1 and self.width == 2) else "adjacent"
            )
        if all(j - i == self.pairs[0][1] - first for i, j in self.pairs):
            return "half"
        return "other"


def turning(core: Core) -> Turning | None:
    """Feed unit queries and watch where they go."""
    from isoform.verify.diagnose.attention import columns_of

    columns = columns_of(core, "q")
    shape = core.inputs["q"].shape
    if columns is None or len({len(c) for c in columns}) != 1:
        return None
    width = len(columns[0])
    images: list[Tensor] = []
    zero = core.operand("q", core.put("q", torch.zeros(shape, dtype=torch.float64)))
    for channel in range(width):
        unit = torch.zeros(shape, dtype=torch.float64)
        for head in columns:
            unit[..., head[channel]] = 1.0
        images.append(core.operand("q", core.put("q", unit)) - zero)
    matrix = torch.stack(images, -1)  # [B, heads, T, channel out, channel in]
    if matrix.shape[-2] != width or not bool(matrix.isfinite().all()):
        return None
    size = matrix.square().sum(-2).sqrt().mean()
    matrix = matrix / size.clamp(min=1e-30)
    off = matrix.abs().amax((0, 1, 2))
    off.fill_diagonal_(0)
    pairs: list[tuple[int, int]] = []
    used: set[int] = set()
    for i in range(width):
        j = int(off[i].argmax())
        if float(off[i, j]) > 1e-7 and i not in used and j not in used:
            pairs.append((min(i, j), max(i, j)))
            used |= {i, j}
    if not pairs:
        return Turning(matrix.new_zeros(*matrix.shape[:1], matrix.shape[2], 0), False, [], width)
    i, j = torch.tensor(pairs).t()
    # Products, so that a gain on either side of the rotation does not count.  [B, heads, T, pairs]
    sine = (matrix[..., j, i] * matrix[..., i, j]).abs().sqrt() * matrix[..., j, i].sign()
    cosine = (matrix[..., i, i] * matrix[..., j, j]).abs().sqrt() * matrix[..., i, i].sign()
    angles = torch.atan2(sine, cosine)
    by_head = bool((angles - angles[:, :1]).abs().max() > 1e-6)
    return (
        Turning(angles[:, 0], by_head, pairs, width)
        if not by_head
        else Turning(angles[:, -1], True, pairs, width)
    )


def explain_turns(add: Any, case: Case, a: Core, b: Core, one: Turning, two: Turning) -> None:
    """Name the difference of two rotations."""
    if not one.pairs and not two.pairs:
        return
    if one.by_head != two.by_head:
        words = ("turns by position", "turns by head")
        add("rope-axis", words[one.by_head], words[two.by_head])
        return
    if not one.pairs or not two.pairs:
        add("rope-partial", _width(one), _width(two))
        return
    if len(one.pairs) != len(two.pairs):
        add("rope-partial", _width(one), _width(two))
    rows = case.rows.get(("site", b.site.index, "q"))
    plain = rows is None or rows.plain
    if plain and one.pairs != two.pairs and len(one.pairs) == len(two.pairs):
        kind = "rope-pairing" if one.pairing != two.pairing else "rope-partial"
        add(
            kind,
            f"pairs channels {_pairs(one)}",
            f"pairs them {_pairs(two)}",
            reference=one.pairs,
            candidate=two.pairs,
        )
    fa, fb = frequencies(one), frequencies(two)
    if len(fa) != len(fb):
        return
    fa, fb = fa.sort(descending=True).values, fb.sort(descending=True).values
    if gap(fa, fb) > 1e-5:
        add("rope-frequency", _theta(fa, one), _theta(fb, two), reference=fa.tolist(), candidate=fb.tolist())


def frequencies(turn: Turning) -> Tensor:
    """Turn per position of each pair, from the first step of the longest row."""
    angle = turn.angle
    if angle.shape[1] < 2:
        return angle[:, 0].abs().amax(0)
    step = angle[:, 1:] - angle[:, :-1]
    step = torch.remainder(step + math.pi, 2 * math.pi) - math.pi
    return step.abs().reshape(-1, step.shape[-1]).median(0).values


def _width(turn: Turning) -> str:
    return (
        f"turns {2 * len(turn.pairs)} of {turn.width} channels of a head"
        if turn.pairs
        else "does not turn queries and keys"
    )


def _pairs(turn: Turning) -> str:
    shown = ", ".join(f"{i} with {j}" for i, j in turn.pairs[:2])
    return f"{shown} ({'halves' if turn.pairing == 'half' else turn.pairing})"


def _theta(frequency: Tensor, turn: Turning) -> str:
    n = len(frequency)
    if n > 1 and float(frequency.min()) > 0:
        theta = float((frequency[0] / frequency[1]).pow(n))
        regular = all(
            abs(float(frequency[i] / frequency[0]) / theta ** (-i / n) - 1) < 1e-3 for i in range(n)
        )
        if regular and abs(float(frequency[0]) - 1) < 1e-4:
            return f"turns with theta = {theta:.6g}"
        if regular:
            return f"turns with theta = {theta:.6g} and positions scaled by {float(frequency[0]):.4g}"
    return (
        "turns by "
        + ", ".join(f"{float(f):.4g}" for f in frequency[:4])
        + (" … per position" if n > 4 else " per position")
    )


def _order_words(case: Case, a: Core, b: Core) -> tuple[str, str]:
    del case
    reach_a, reach_b = _reach(a), _reach(b)
    if reach_a != reach_b:
        words = {True: "normalises over all heads together", False: "normalises each head"}
        return words[reach_a], words[reach_b]
    return (
        "normalises queries and keys in one way",
        "normalises them in another (gains, or the order with the rotation)",
    )


def _reach(core: Core) -> bool:
    """Whether a head's query depends on other heads' channels."""
    q = core.inputs["q"]
    half = q.clone()
    half[..., : q.shape[-1] // 2] *= 3.0
    before, after = core.operand("q", core.given()), core.operand("q", core.put("q", half))
    return gap(before[:, -1], after[:, -1]) > 1e-9
