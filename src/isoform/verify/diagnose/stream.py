"""The stream between the sublayers: embeddings, sums, norms."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from isoform.verify.align import Key, Model
from isoform.verify.diagnose import pooling, routing
from isoform.verify.diagnose.case import Case, layer_of
from isoform.verify.diagnose.positions import explain_shift
from isoform.verify.diagnose.report import Place
from isoform.verify.diagnose.unary import CLOSE, Step, close, describe, gap, said


@dataclasses.dataclass(eq=False)
class Wire:
    """A function of one vector per token between two points of the stream.

    Args:
        name: its key in both models.
        what: "trunk" behind a sum, "read" in front of a map, "add" into a sum.
        source, target: nodes.
    """

    name: Key
    what: str
    source: int
    target: int
    held: tuple[int, ...] = ()


def check(case: Case) -> None:
    """Every point of the stream that both models have, and the places where only one has one."""
    a, b = case.a, case.b
    wires: list[tuple[Wire, Wire]] = []
    for key, node_b in b.states.items():
        node_a = a.states.get(key)
        if node_a is None:
            continue
        wires += _trunk(case, key, node_a, node_b)
        wires += _sum(case, key, node_a, node_b)
    for key, read_b in b.reads.items():
        read_a = a.reads.get(key)
        if read_a is not None:
            wires += _read(case, key, read_a, read_b)
    _wiring(case)
    _explain(case, wires)


def _trunk(case: Case, key: Key, na: int, nb: int) -> list[tuple[Wire, Wire]]:
    a, b = case.a, case.b
    ta, tb = a.structure.trunk.get(na, na), b.structure.trunk.get(nb, nb)
    wire = (Wire((*key, "trunk"), "trunk", na, ta), Wire((*key, "trunk"), "trunk", nb, tb))
    value_a, out_a = a.of_node(na), a.of_node(ta)
    if value_a is None or out_a is None:
        return []
    if nb in b.structure.entries:
        _entry(case, na, nb)
        value_a = b.of_node(nb)
        assert value_a is not None
    return [] if _same(case, tb, {nb: value_a}, out_a, "trunk") else [wire]


def _entry(case: Case, na: int, nb: int) -> None:
    """Token vectors as they come out of the table."""
    va, vb = case.a.of_node(na), case.b.of_node(nb)
    if va is None or vb is None:
        return
    role = case.a.role(na)
    ratio = float((va * vb).sum() / va.square().sum()) if va.shape == vb.shape else 1.0
    if va.shape == vb.shape and case.differ(va * ratio, vb, role) <= CLOSE and ratio != 0:
        return
    place = case.place("embedding", na, nb)
    if va.shape != vb.shape:
        case.add("unexplained", place, f"embeds {list(va.shape)}", f"embeds {list(vb.shape)}", nb)
        return
    off = _shifted_ids(va, vb)
    if off:
        case.add("decode-protocol", place, "looks up the ids as given", f"looks up ids {off} places on", nb)
        return
    case.add(
        "tie-lost",
        place,
        "looks up its checkpoint's token vectors",
        "looks up others",
        nb,
        relative_difference=case.differ(va, vb, role),
    )


def _shifted_ids(a: Tensor, b: Tensor) -> int:
    for k in (1, -1):
        x, y = (a[:, k:], b[:, :-k]) if k > 0 else (a[:, :k], b[:, -k:])
        if y.shape[1] and gap(x, y) < CLOSE:
            return k
    return 0


def _sum(case: Case, key: Key, na: int, nb: int) -> list[tuple[Wire, Wire]]:
    a, b = case.a, case.b
    if nb in b.structure.entries or na in a.structure.entries:
        return []
    tops_a, tops_b = _tops(a, na), _tops(b, nb)
    if set(tops_a) != set(tops_b):
        return []
    given: dict[int, Tensor] = {}
    for name, node in tops_b.items():
        value = a.of_node(tops_a[name])
        if value is not None:
            given[node] = value
    out = a.of_node(na)
    if out is None or _same(case, nb, given, out, "sum"):
        return []
    if routing.explain(case, tops_a, tops_b):
        return []
    held_a, held_b = tuple(tops_a.values()), tuple(tops_b.values())
    return [
        (
            Wire((*key, "add", name), "add", tops_a[name], na, held_a),
            Wire((*key, "add", name), "add", node, nb, held_b),
        )
        for name, node in tops_b.items()
    ]


def _tops(model: Model, node: int) -> dict[Key, int]:
    """What a sum is made of, by key."""
    found: dict[Key, int] = {}
    structure = model.structure
    for arg in model.graph.live_args(node):
        for top in structure.tops(arg):
            if top in model.sources and top not in structure.entries:
                found[model.sources[top]] = top
            else:
                found[model.state_key(top)] = structure.trunk.get(top, top)
    return found


def _read(case: Case, key: Key, ra: int, rb: int) -> list[tuple[Wire, Wire]]:
    a, b = case.a, case.b
    tops_a, tops_b = _reading(a, ra), _reading(b, rb)
    value = a.of_node(ra)
    if set(tops_a) != set(tops_b) or value is None:
        return []
    given: dict[int, Tensor] = {}
    for name, node in tops_b.items():
        found = a.of_node(tops_a[name])
        if found is None:
            return []
        given[node] = found
    if _same(case, rb, given, value, "read"):
        return []
    return [
        (Wire((*key, "read"), "read", tops_a[n], ra), Wire((*key, "read"), "read", tops_b[n], rb))
        for n in tops_b
    ]


def _reading(model: Model, node: int) -> dict[Key, int]:
    structure = model.structure
    found: dict[Key, int] = {}
    for top in structure.tops(node):
        key = model.sources[top] if top in structure.by_out else model.state_key(top)
        found[key] = structure.trunk.get(top, top)
    return found


def _same(case: Case, target: int, given: dict[int, Tensor], expected: Tensor, what: str) -> bool:
    """Run B's part on A's values and compare at real positions."""
    b = case.b
    shaped: dict[int, Tensor] = {}
    for node, value in given.items():
        if b.of_node(node, value.shape[-1]) is None:
            return False
        shaped[node] = b.graph.shaped(value, node, value.shape[-1])
    try:
        out = b.graph.evaluate(target, shaped)
    except RuntimeError:  # sizes that hang on the values themselves: nothing is said about this part
        return True
    found = b.graph.canonical(out, expected.shape[-1], target)
    if found is None:
        return False
    difference = case.differ(expected, found, b.role(target))
    case.checked.append((what, target, difference))
    return difference <= case.tolerance


def _wiring(case: Case) -> None:
    """Sublayers that read another point of the stream than in the other model."""
    a, b = case.a, case.b
    only_a, only_b = set(a.states) - set(b.states), set(b.states) - set(a.states)
    if case.torn or (not only_a and not only_b):
        return
    for key, rb in b.reads.items():
        ra = a.reads.get(key)
        if ra is None:
            continue
        tops_a, tops_b = set(_reading(a, ra)), set(_reading(b, rb))
        if tops_a == tops_b:
            continue
        place = case.place(_reader(case, key), ra, rb)
        seen_a, seen_b = _contents(tops_a), _contents(tops_b)
        extra = {k[0] for k in seen_a ^ seen_b}
        if key[0] == "inner" and "site" in extra:
            later, sooner = "reads the stream after attention", "reads the stream before attention"
            said_a, said_b = (later, sooner) if len(seen_a) > len(seen_b) else (sooner, later)
            case.add("parallel-residual", place, said_a, said_b, rb)
            return
        missing = next((a.states[t] for t in tops_a - tops_b if t in only_a), None)
        if missing is not None and len(seen_b) < len(seen_a):
            place = case.place("sum of the stream", missing, rb)
        case.add(
            "unexplained",
            place,
            f"reads a sum of {len(seen_a)} contributions",
            f"reads a sum of {len(seen_b)}",
            rb,
            hint="a residual connection is missing, added or elsewhere: compare the sums before this part",
        )
        return


def _contents(tops: set[Key]) -> set[Key]:
    found: set[Key] = set()
    for key in tops:
        if key[0] == "state":
            found |= set(key[1])  # type: ignore[arg-type]
        else:
            found.add(key)
    return found


def _reader(case: Case, key: Key) -> str:
    if key[0] == "site":
        cross = any(s.cross for s in case.a.structure.sites if s.index == key[1])
        return "cross-attention" if cross else "attention"
    return "feed-forward" if key[0] == "inner" else "end of the stack"


def _explain(case: Case, wires: list[tuple[Wire, Wire]]) -> None:
    described: list[tuple[Wire, Wire, list[Step], list[Step]]] = []
    for wa, wb in wires:
        described.append((wa, wb, _steps(case.a, wa), _steps(case.b, wb)))
    described = [d for d in described if not _left_behind(case, d, described)]
    lost = [d for d in described if _norms(d[2]) > _norms(d[3]) and not _unknown(d[2], d[3])]
    gained = [d for d in described if _norms(d[2]) < _norms(d[3]) and not _unknown(d[2], d[3])]
    moved = bool(lost and gained)
    silent: dict[int, tuple[Wire, Wire, list[Step], list[Step]]] = {}
    spoken: set[int] = set()
    for wa, wb, sa, sb in described:
        count = len(case.raw)
        place = _place(case, wa, wb)
        said_a, said_b = _told(sa), _told(sb)
        if _unknown(sa, sb):
            kind = "pooling" if _pools(sa) or _pools(sb) else "unexplained"
            if kind == "pooling":
                place = dataclasses.replace(place, layer=None)
            case.add(
                kind, place, f"{said_a} here", f"{said_b} here", wb.target, profile=_profile(case, wa, wb)
            )
        elif _norms(sa) != _norms(sb):
            kind = "norm-placement" if moved or _is_added(wb) else "norm-missing"
            case.add(kind, place, f"{said_a} here", f"{said_b} here", wb.target)
            if not moved:
                _steps_differ(case, place, wa, wb, sa, sb)
        else:
            _steps_differ(case, place, wa, wb, sa, sb)
        if len(case.raw) > count:
            spoken.add(wb.target)
        else:
            silent[wb.target] = (wa, wb, sa, sb)
    for target, (wa, wb, sa, sb) in silent.items():
        if target not in spoken:
            place = _place(case, wa, wb)
            case.add("unexplained", place, f"{_told(sa)} here", f"{_told(sb)} here", target)
    if moved:
        _joined(case)


Described = tuple[Wire, Wire, list[Step], list[Step]]


def _left_behind(case: Case, this: Described, others: list[Described]) -> bool:
    """A norm behind a sum in one model, before its only reader in the other, the sum going no further."""
    wa, wb, sa, sb = this
    if _norms(sa) == _norms(sb) or _unknown(sa, sb) or wb.what == "add":
        return False
    for model, wire in ((case.a, wa), (case.b, wb)):
        tops = {wire.source, *model.structure.tops(wire.source)}
        state = next((t for t in tops if t in (*model.structure.states, *model.structure.entries)), None)
        key = None if state is None else model.state_key(state)
        if not any(key in _tops(model, n) for n in model.structure.states if n != state):
            return any(
                _norms(x[2]) - _norms(x[3]) == _norms(sb) - _norms(sa) and not _unknown(x[2], x[3])
                for x in others
                if x is not this
            )
    return False


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


def _steps(model: Model, wire: Wire) -> list[Step]:
    value = model.of_node(wire.source)
    if value is None:
        return [Step("other")]
    if pooling.is_pooled(model, wire.source, wire.target):
        return pooling.steps(model, wire.source, wire.target)
    held = tuple(n for n in wire.held if n != wire.source)
    return describe(model, wire.source, wire.target, value.shape[-1], value.shape, held)


def _unknown(*steps: list[Step]) -> bool:
    return any(s.kind == "other" for found in steps for s in found)


def _norms(steps: list[Step]) -> int:
    return sum(s.kind == "norm" for s in steps)


def _pools(steps: list[Step]) -> str:
    return next((s.words for s in steps if s.kind == "pool"), "")


def _told(steps: list[Step]) -> str:
    return ", then ".join(_verb(str(s)) for s in steps)


def _verb(text: str) -> str:
    return f"applies {text}" if text[0].isupper() else ("computes " + text if text.startswith("a ") else text)


def _is_added(wire: Wire) -> bool:
    return wire.what == "add"


def _place(case: Case, wa: Wire, wb: Wire) -> Place:
    place = case.place(_part(case, wb), wa.target, wb.target)
    if wb.what == "read" and wb.name[0] == "site":  # memory is read in another stream than it stands in
        site = next(s for s in case.a.structure.sites if s.index == wb.name[1])
        place = dataclasses.replace(place, layer=layer_of(case.a, site.query))
    return place


def _part(case: Case, wire: Wire) -> str:
    if wire.what == "read":
        return f"stream as read by {_reader(case, wire.name)}"
    if wire.source in case.b.structure.entries:
        return "embedding"
    return "sum of the stream" if wire.what == "add" else "stream after the sum"


def _profile(case: Case, wa: Wire, wb: Wire) -> dict[str, object]:
    value, out = case.a.of_node(wa.source), case.a.of_node(wa.target)
    if value is None or out is None or wa.held:
        return {}
    found = case.b.graph.evaluate(
        wb.target, {wb.source: case.b.graph.shaped(value, wb.source, value.shape[-1])}
    )
    other = case.b.graph.canonical(found, out.shape[-1], wb.target)
    return {} if other is None else profile(out, other)


def profile(a: Tensor, b: Tensor) -> dict[str, object]:
    """Where two values ``[B, T, d]`` differ: by row, position and channel."""
    error = (a - b).abs() / a.abs().max().clamp(min=1e-30)
    return {
        "by_row": error.amax((1, 2)).tolist(),
        "by_position": error.amax((0, 2)).tolist(),
        "by_channel": error.amax((0, 1))[:64].tolist(),
    }


def _steps_differ(case: Case, place: Place, wa: Wire, wb: Wire, sa: list[Step], sb: list[Step]) -> None:
    """Both are made of the same kinds of steps; which of their values differ?"""
    norms = [
        (x, y)
        for x, y in zip(
            [s for s in sa if s.kind == "norm"], [s for s in sb if s.kind == "norm"], strict=False
        )
    ]
    count = len(case.raw)
    for x, y in norms:
        norm_differs(case, place, wb.target, x, y)
    for raw in case.raw[count:]:
        if raw.kind == "norm-missing" and "found" in raw.evidence and _beside_attention(case, wb):
            raw.kind = "parallel-residual"
    if _pools(sa) != _pools(sb):
        at = dataclasses.replace(place, layer=None)
        case.add("pooling", at, _pools(sa), _pools(sb), wb.target)
    affine_a = next((s for s in sa if s.kind == "affine"), Step("affine"))
    affine_b = next((s for s in sb if s.kind == "affine"), Step("affine"))
    _affine(case, place, wa, wb, affine_a, affine_b)


def _beside_attention(case: Case, wire: Wire) -> bool:
    """Whether a feed-forward network reads the same point of the stream as an attention, in both models."""
    if wire.what != "read" or wire.name[0] != "inner":
        return False
    found: list[bool] = []
    for model in (case.a, case.b):
        own = model.structure.tops(model.reads[wire.name[:2]])
        reads = [node for key, node in model.reads.items() if key[0] == "site"]
        found.append(any(model.structure.tops(node) == own for node in reads))
    return all(found)


def norm_differs(case: Case, place: Place, order: int, a: Step, b: Step) -> None:
    assert a.gain is not None and b.gain is not None and a.bias is not None and b.bias is not None
    add = lambda kind, x, y, **e: case.add(kind, place, x, y, order, **e)  # noqa: E731
    width = len(a.gain)
    if a.norm != b.norm:
        add(
            "unexplained",
            f"applies {str(a).split(' with')[0]} here",
            f"applies {str(b).split(' with')[0]} here",
            hint="the kind of norm differs: one subtracts the mean and the other does not",
        )
    ratio = b.gain / a.gain
    unbiased = ((width - 1) / width) ** 0.5
    factor = float(ratio.median())
    bessel = min(abs(factor - unbiased), abs(factor - 1 / unbiased)) < 1e-6 and float(ratio.std()) < 1e-6
    if bessel:
        n, m = (f"n = {width}", f"n − 1 = {width - 1}")
        add(
            "norm-eps",
            f"divides the variance by {n if factor < 1 else m}",
            f"divides it by {m if factor < 1 else n}",
        )
    elif a.outside != b.outside:
        said_a, said_b = ("outside" if s.outside else "inside" for s in (a, b))
        add("norm-eps", f"adds ε {said_a} the root", f"adds it {said_b}", reference=a.eps, candidate=b.eps)
    elif not _equal_eps(a.eps, b.eps):
        add("norm-eps", f"uses ε = {a.eps:.3g}", f"uses ε = {b.eps:.3g}", reference=a.eps, candidate=b.eps)
    foreign: dict[str, str | None] = {}
    if not bessel and not close(a.gain, b.gain, 1e-6):
        offset = b.gain - a.gain
        if abs(abs(float(offset.mean())) - 1) < 1e-5 and float(offset.std()) < 1e-5:
            more, less = "multiplies by 1 + w", "multiplies by w"
            up = float(offset.mean()) > 0
            add("norm-offset", less if up else more, more if up else less)
        elif float((b.gain - b.gain[0]).abs().max()) < 1e-6 or float((a.gain - a.gain[0]).abs().max()) < 1e-6:
            flat_a, flat_b = (float((s.gain - s.gain[0]).abs().max()) < 1e-6 for s in (a, b))  # type: ignore[operator,index]
            add(
                "norm-missing",
                "has no gain of its own" if flat_a else "multiplies by a gain",
                "has no gain of its own" if flat_b else "multiplies by a gain",
            )
        else:
            foreign["gain"] = _whose(case, b.gain)
    if (
        not close(a.bias, b.bias, 1e-6)
        and float(torch.maximum(a.bias.abs().max(), b.bias.abs().max())) > 1e-9
    ):
        none_a, none_b = float(a.bias.abs().max()) == 0, float(b.bias.abs().max()) == 0
        if none_a or none_b:
            add(
                "bias-missing",
                "adds no bias after the norm" if none_a else "adds a bias after the norm",
                "adds none" if none_b else "adds one",
            )
        else:
            foreign["bias"] = _whose(case, b.bias)
    if foreign:
        known = None not in foreign.values()
        add(
            "norm-missing" if known else "tie-lost",
            f"uses its own {' and '.join(foreign)} here",
            "uses another norm's" if known else "uses others, that are not in the checkpoint",
            found=foreign,
        )


def _equal_eps(a: float, b: float) -> bool:
    if max(a, b) < 1e-14:
        return True
    return min(a, b) / max(a, b) > 0.97


def _whose(case: Case, vector: Tensor) -> str | None:
    for name, value in case.a.recording.parameters.items():
        if value.dim() == 1 and value.shape == vector.shape and value.is_floating_point():
            for shift in (0.0, 1.0):
                if close(value.double() + shift, vector, 1e-5):
                    return name
    return None


def _affine(case: Case, place: Place, wa: Wire, wb: Wire, a: Step, b: Step) -> None:
    entry = wb.source in case.b.structure.entries and wb.what == "trunk"
    role = case.a.role(wa.source)
    table = 1.0
    if entry:
        va, vb = case.a.of_node(wa.source), case.b.of_node(wb.source)
        assert va is not None and vb is not None
        table = float((va * vb).sum() / va.square().sum())
    scale_b = b.scale * table if entry else b.scale
    if not _equal_scales(a.scale, scale_b, case.constants):
        kind = "embedding-scale" if entry else "softcap"
        what = "token vectors" if entry else "this branch"
        evidence: dict[str, Any] = {}
        if isinstance(a.scale, float) and isinstance(scale_b, float):
            evidence = {"ratio": scale_b / a.scale if a.scale else float("inf")}
        case.add(
            kind,
            place,
            f"multiplies {what} by {said(a.scale)}",
            f"multiplies {'them' if entry else 'it'} by {said(scale_b)}",
            wb.target,
            **evidence,
        )
    if wb.what == "add" and not entry:
        return
    zero = case.a.of_node(wa.target)
    assert zero is not None
    shift_a = torch.zeros_like(zero) if a.shift is None else a.shift
    shift_b = torch.zeros_like(shift_a) if b.shift is None else b.shift
    if shift_a.shape == shift_b.shape and case.differ(shift_a, shift_b, role) > 1e-6:
        explain_shift(case, place, shift_a, shift_b, role, wb.target)


def _equal_scales(a: float | Tensor, b: float | Tensor, tolerance: float) -> bool:
    x, y = torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
    if x.dim() != y.dim():
        x, y = torch.broadcast_tensors(x, y)
    return gap(x, y) < tolerance
