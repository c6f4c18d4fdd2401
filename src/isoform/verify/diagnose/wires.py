"""What happens to the vectors of tokens between two points of the stream, step by step in both models."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from isoform.verify.diagnose.case import Case
from isoform.verify.diagnose.described import (
    Described,
    alike,
    described,
    norms,
    place_of,
    pools,
    pools_differ,
    steps,
    unknown,
    wire_profile,
)
from isoform.verify.diagnose.factors import affine, multiple, multiplied
from isoform.verify.diagnose.norms import beside_attention, eps_differs, norm_differs, twice, whose
from isoform.verify.diagnose.report import Place
from isoform.verify.diagnose.unary import Step, close
from isoform.verify.diagnose.wiring import Wire, tops


def explain_wires(case: Case, wires: list[tuple[Wire, Wire]]) -> None:
    every = [found for wa, wb in wires for found in described(case, wa, wb)]
    left = [d for d in every if not _left_behind(case, d, every)]
    for wa, wb, sa, sb in every:
        if not any(wb is d[1] for d in left):
            pools_differ(case, place_of(case, wa, wb), wb, sa, sb)
    lost = [d for d in left if norms(d[2]) > norms(d[3]) and not unknown(d[2], d[3])]
    gained = [d for d in left if norms(d[2]) < norms(d[3]) and not unknown(d[2], d[3])]
    moved = bool(lost and gained)
    gone = [(d, s) for d in every if norms(d[2]) > norms(d[3]) for s in d[2] if s.gain is not None]
    come = [(d, s) for d in every if norms(d[2]) < norms(d[3]) for s in d[3] if s.gain is not None]
    before, after = [s for _, s in gone], [s for _, s in come]
    strays = any(alike(x, y) for x in before for y in after)
    silent: dict[int, tuple[Wire, Wire, list[Step], list[Step]]] = {}
    spoken: set[int] = set()
    for wa, wb, sa, sb in left:
        with case.within((wa.target, {wa.source, *wa.held}), (wb.target, {wb.source, *wb.held})):
            count = len(case.raw)
            place = place_of(case, wa, wb)
            said_a, said_b = _told(sa), _told(sb)
            if unknown(sa, sb):
                kind = "pooling" if pools(sa) or pools(sb) else "unexplained"
                times = None if kind == "pooling" else multiple(case, wa, wb)
                if times is not None:
                    multiplied(case, place, wa, wb, 1.0, times)
                    spoken.add(wb.target)
                    continue
                if kind == "pooling":
                    place = dataclasses.replace(place, layer=None)
                case.add(
                    kind,
                    place,
                    f"{said_a} here",
                    f"{said_b} here",
                    wb.target,
                    profile=wire_profile(case, wa, wb),
                )
            elif norms(sa) != norms(sb):
                here = moved and not (strays and _stray(sa, sb, before, after))
                kind = "norm-placement" if here or _is_added(wb) else "norm-missing"
                place = _read_in(case, (wa, wb, sa, sb), left, place) if here else place
                lost = any(isinstance(s.scale, float) and not s.scale for s in (*sa, *sb))
                evidence: dict[str, Any] = {"ratio": 0.0} if lost else {}
                words = f"{_told_norms(sa)} here", f"{_told_norms(sb)} here"
                case.add(kind, place, *words, wb.target, **evidence)
                if not here and not _beside_gain(case, sa, sb):
                    _steps_differ(case, place, wa, wb, sa, sb)
                else:
                    pools_differ(case, place, wb, sa, sb)
            else:
                _steps_differ(case, place, wa, wb, sa, sb)
            if len(case.raw) > count:
                spoken.add(wb.target)
            else:
                silent[wb.target] = (wa, wb, sa, sb)
    for target, (wa, wb, sa, sb) in silent.items():
        if target not in spoken:
            place = place_of(case, wa, wb)
            with case.within((wa.target, {wa.source, *wa.held}), (wb.target, {wb.source, *wb.held})):
                case.add("unexplained", place, f"{_told(sa)} here", f"{_told(sb)} here", target)
    if moved:
        _moved_differ(case, gone, come)
        case.raw = [r for r in case.raw if "twice in a row" not in r.reference + r.candidate]
        _joined(case)


def _moved_differ(case: Case, gone: list[tuple[Described, Step]], come: list[tuple[Described, Step]]) -> None:
    """A norm that moved, compared with itself."""
    for (wa, wb, *_), y in come:
        x = next((x for _, x in gone if alike(x, y)), None)
        if x is not None:
            norm_differs(case, place_of(case, wa, wb), wb.target, x, y)


def _stray(a: list[Step], b: list[Step], before: list[Step], after: list[Step]) -> bool:
    """Whether none of the norms that are at this place in one model is at another place in the other."""
    own, others = (a, after) if norms(a) > norms(b) else (b, before)
    return not any(alike(x, y) for x in own if x.gain is not None for y in others)


def _beside_gain(case: Case, a: list[Step], b: list[Step]) -> bool:
    """Whether a factor beside no norm is in the other model too, there as a multiple of the norm's gain."""
    for normed, bare in ((a, b), (b, a)):
        gains = [s.gain for s in normed if s.gain is not None]
        factors = [s.scale for s in bare if s.kind == "affine"]
        scales = [x for x in factors if isinstance(x, float) and x != 1.0]
        if len(gains) == 1 and len(scales) == 1 and whose(case.a, gains[0] / scales[0]) is not None:
            return all(s.shift is None for s in bare)
    return False


def explain_small(case: Case, wires: list[tuple[Wire, Wire]]) -> None:
    """Norms that differ in ε, where the values are too large for it to show."""
    for wa, wb in wires:
        found = [[s for s in steps(m, w) if s.kind == "norm"] for m, w in ((case.a, wa), (case.b, wb))]
        if len(found[0]) == len(found[1]):
            for x, y in zip(*found, strict=True):
                doubled = twice(x, y) or twice(y, x)
                if doubled and any(r.kind == "norm-placement" for r in case.raw):
                    continue  # it is the norm that moved
                (norm_differs if doubled else eps_differs)(case, place_of(case, wa, wb), wb.target, x, y)


def _left_behind(case: Case, this: Described, others: list[Described]) -> bool:
    """A norm behind a sum in one model, before its only reader in the other, the sum going no further."""
    wa, wb, sa, sb = this
    if norms(sa) == norms(sb) or unknown(sa, sb) or wb.what == "add" or wb.half:
        return False
    for model, wire in ((case.a, wa), (case.b, wb)):
        above = {wire.source, *model.structure.tops(wire.source)}
        state = next((t for t in above if t in (*model.structure.states, *model.structure.entries)), None)
        key = None if state is None else model.state_key(state)
        if not any(key in tops(model, n) for n in model.structure.states if n != state):
            return any(
                norms(x[2]) - norms(x[3]) == norms(sb) - norms(sa)
                and not unknown(x[2], x[3])
                and any(alike(one, two) for one in _gained(this) for two in _gained(x))
                for x in others
                if x is not this
            )
    return False


def _gained(described: Described) -> list[Step]:
    """The norms of both models."""
    return [s for s in (*described[2], *described[3]) if s.gain is not None]


def _read_in(case: Case, this: Described, others: list[Described], place: Place) -> Place:
    """A norm that moved belongs to the layer that reads it in one of the models."""
    gains = [s.gain for s in (*this[2], *this[3]) if s.gain is not None]
    layers: list[int | None] = []
    for wa, wb, sa, sb in others:
        found = [s.gain for s in (*sa, *sb) if s.gain is not None]
        if this[1].what != "read" and wb.what == "read" and any(close(x, y) for x in gains for y in found):
            layers.append(place_of(case, wa, wb).layer)
    return place if not layers or place.layer in layers else dataclasses.replace(place, layer=layers[0])


def _joined(case: Case) -> None:
    """A norm that moved is one finding, with what each place does in the evidence."""
    moved = [r for r in case.raw if r.kind == "norm-placement"]
    for raw in moved:
        raw.evidence = {"reference": raw.reference, "candidate": raw.candidate, **raw.evidence}
    reads = [r for r in moved if "read by" in r.place.part]
    first = (reads or moved)[0]
    normed = "Norm" in first.reference
    inside, outside = "normalises what a sublayer reads", "normalises what is left in the stream"
    for raw in moved:
        raw.reference, raw.candidate = (inside, outside) if normed == bool(reads) else (outside, inside)
        raw.place = dataclasses.replace(raw.place, part="norm: " + raw.place.part)


def _told_norms(steps: list[Step]) -> str:
    return _told([s for s in steps if s.kind == "norm"]) or "does not normalise"


def _told(steps: list[Step]) -> str:
    return ", then ".join(_verb(str(s)) for s in steps)


def _verb(text: str) -> str:
    return f"applies {text}" if text[0].isupper() else ("computes " + text if text.startswith("a ") else text)


def _is_added(wire: Wire) -> bool:
    return wire.what == "add"


def _steps_differ(case: Case, place: Place, wa: Wire, wb: Wire, sa: list[Step], sb: list[Step]) -> None:
    """Both are made of the same kinds of steps; which of their values differ?"""
    both = _paired([s for s in sa if s.kind == "norm"], [s for s in sb if s.kind == "norm"])
    count = len(case.raw)
    entry = wb.source in case.b.structure.entries and wb.what == "trunk"
    for x, y in both:
        times = _times(x, y) if entry else None
        if times is None:
            norm_differs(case, place, wb.target, x, y)
            continue
        words = "multiplies token vectors by 1 in front of their norm", f"multiplies them by {times:.6g}"
        case.add("embedding-scale", place, *words, wb.target, ratio=times)
    for raw in case.raw[count:]:
        if raw.kind == "norm-missing" and "found" in raw.evidence and beside_attention(case, wb):
            raw.kind = "parallel-residual"
        elif raw.kind == "norm-missing" and "found" in raw.evidence and _other_maps(case, place):
            raw.kind = "tie-lost"
    pools_differ(case, place, wb, sa, sb)
    affine_a = next((s for s in sa if s.kind == "affine"), Step("affine"))
    affine_b = next((s for s in sb if s.kind == "affine"), Step("affine"))
    affine(case, place, wa, wb, affine_a, affine_b)


def _paired(a: list[Step], b: list[Step]) -> list[tuple[Step, Step]]:
    """Norms that correspond, in order; where one model has more of them, those whose gains are most alike."""
    few, many = sorted((a, b), key=len)

    def apart(chosen: tuple[Step, ...]) -> float:
        gains = ((x.gain, y.gain) for x, y in zip(few, chosen, strict=True))
        return sum(float((y - x).std()) for x, y in gains if x is not None and y is not None)

    chosen = min(itertools.combinations(many, len(few)), key=apart)
    return list(zip(a, chosen, strict=True) if few is a else zip(chosen, b, strict=True))


def _times(a: Step, b: Step) -> float | None:
    """Two norms that are one but for ε in the ratio of the width: √d stands in front of one of them."""
    assert a.gain is not None and b.gain is not None and a.bias is not None and b.bias is not None
    same = a.norm == b.norm and close(a.gain, b.gain) and close(a.bias, b.bias) and min(a.eps, b.eps) > 0
    ratio = a.eps / b.eps if same else 1.0
    width = len(a.gain)
    return next((w**0.5 for w in (width, 1 / width) if abs(ratio / w - 1) < 1e-2), None)


def _other_maps(case: Case, place: Place) -> bool:
    """Whether matrices of this layer are another's too: then the layer is, and not the norm alone."""
    maps = [r for r in case.raw if r.kind == "tie-lost" and r.place.layer == place.layer]
    return place.layer is not None and any("found" in r.evidence for r in maps)
