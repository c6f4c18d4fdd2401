"""How queries and keys are turned by position: how far, in which pairs of channels, which way."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from isoform.verify.diagnose.case import Case
from isoform.verify.diagnose.cores import Core, columns_of
from isoform.verify.diagnose.unary import gap


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


def images(core: Core, which: str) -> Tensor | None:
    """What becomes of unit vectors: ``[B, heads, T, channel out, channel in]`` of queries or keys."""
    columns = columns_of(core, which)
    shape = core.inputs[which].shape
    if len({len(c) for c in columns}) != 1:
        return None
    width = len(columns[0])
    if core.operand(which, core.given()).shape[-1] != width:
        return None
    zero = core.operand(which, core.put(which, torch.zeros(shape, dtype=torch.float64)))
    found: list[Tensor] = []
    for channel in range(width):
        unit = torch.zeros(shape, dtype=torch.float64)
        for head in columns:
            unit[..., head[channel]] = 1.0
        found.append(core.operand(which, core.put(which, unit)) - zero)
    matrix = torch.stack(found, -1)
    return matrix if bool(matrix.isfinite().all()) else None


def centred(matrix: Tensor) -> Tensor:
    """Images of unit vectors without what is subtracted from all channels alike, a norm's mean."""
    return matrix - matrix.median(-1, keepdim=True).values if matrix.shape[-1] > 4 else matrix


def turning(core: Core) -> Turning | None:
    """Feed unit queries and watch where they go."""
    matrix = images(core, "q")
    if matrix is None:
        return None
    matrix, width = centred(matrix), matrix.shape[-1]
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
    if len(one.pairs) != len(two.pairs):
        add("rope-partial", _width(one), _width(two))
        _beside_width(add, one, two, channels(case, a, b, "q"))
        return
    places = channels(case, a, b, "q")
    if places != channels(case, a, b, "k"):
        return  # other channels of queries meet other channels of keys: not a matter of the rotation
    pairs = [(places[i], places[j]) for i, j in two.pairs]
    own, other = ([frozenset(p) for p in x] for x in (one.pairs, pairs))
    fa, fb = frequencies(one), frequencies(two)
    near = max(1e-5, case.constants)
    order = [other.index(p) for p in own] if set(own) == set(other) else None
    if order is None:
        moved = places != list(range(len(places)))
        kind = "rope-pairing" if moved or one.pairing != two.pairing else "rope-partial"
        said = _pairs(two) if not moved else ", ".join(f"{i} with {j}" for i, j in pairs[:2])
        add(
            kind,
            f"pairs channels {_pairs(one)}",
            f"pairs them {said}" + (" of the reference's rows" if moved else ""),
            reference=one.pairs,
            candidate=pairs,
        )
    else:
        flipped = torch.tensor([-1.0 if pairs[k][0] > pairs[k][1] else 1.0 for k in order])
        fb = fb[order] * flipped
        if gap(fa, -fb) < near and gap(fa, fb) > near:
            add(
                "rope-pairing",
                "turns the first channel of a pair towards the second",
                "turns the second towards the first",
            )
            return
    if gap(fa.abs(), fb.abs()) <= near:
        return
    fa, fb = (f.abs().sort(descending=True).values for f in (fa, fb))
    if gap(fa, fb) > near:
        add("rope-frequency", _theta(fa, one), _theta(fb, two), reference=fa.tolist(), candidate=fb.tolist())
    elif order is not None:
        add("rope-pairing", "gives its pairs of channels one order of angles", "gives them another")


def _beside_width(add: Any, one: Turning, two: Turning, places: list[int]) -> None:
    """Pairs and theta of rotations of another width, where each has several pairs."""
    if min(len(one.pairs), len(two.pairs)) < 2:
        return
    # Rows may be laid out otherwise: the pairing is another if it is so in the order of either model's rows.
    there = dataclasses.replace(one, pairs=[(places.index(i), places.index(j)) for i, j in one.pairs])
    here = dataclasses.replace(two, pairs=[(places[i], places[j]) for i, j in two.pairs])
    if all({x.pairing, y.pairing} == {"half", "interleaved"} for x, y in ((one, here), (there, two))):
        add("rope-pairing", f"pairs channels {_pairs(one)}", f"pairs them {_pairs(here)}")
    fa, fb = (frequencies(turn).abs().sort(descending=True).values for turn in (one, two))
    steps, bases = (
        [float((f[0] / f[1]).pow(n)) for f, n in x]
        for x in (((fa, 1), (fb, 1)), ((fa, len(fa)), (fb, len(fb))))
    )
    # Either the ratio of neighbours or theta is kept where the width alone is another.
    if all(abs(x / y - 1) > 1e-3 for x, y in (steps, bases)):
        add("rope-frequency", _theta(fa, one), _theta(fb, two), reference=fa.tolist(), candidate=fb.tolist())


def channels(case: Case, a: Core, b: Core, which: str) -> list[int]:
    """For each channel of B's first head the channel of A's that has the same row of the projection."""
    of_a, of_b = columns_of(a, which), columns_of(b, which)
    rows = case.rows.get(("site", b.site.index, which))
    plain = list(range(b.width))
    if rows is None or len(of_b[0]) != b.width:
        return plain
    moved = [int(rows.index[c]) for c in of_b[0]]
    head = next((columns for columns in of_a if set(columns) == set(moved)), None)
    return plain if head is None else [head.index(c) for c in moved]


def frequencies(turn: Turning) -> Tensor:
    """Turn per position of each pair, with its direction."""
    angle = turn.angle
    if angle.shape[1] < 2:
        return angle[0, 0]
    step = angle[:, 1:] - angle[:, :-1]
    step = torch.remainder(step + math.pi, 2 * math.pi) - math.pi
    return step.reshape(-1, step.shape[-1]).median(0).values


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
