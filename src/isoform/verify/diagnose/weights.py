"""Do both models apply the same matrices and biases? (deviations seen from the weights)"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from isoform.verify.align import Inner, Linear, Model, Part, Site, filled, values_of
from isoform.verify.diagnose.biases import NOTHING, biases, output_bias, summed, total
from isoform.verify.diagnose.case import Case, layer_of
from isoform.verify.diagnose.norms import whose
from isoform.verify.diagnose.packing import told, whose_rows
from isoform.verify.diagnose.unary import gap
from isoform.verify.rows import Rows, match_rows, rows_of, whole

NAMES = {"q": "query projection", "k": "key projection", "v": "value projection"}


def check_site(case: Case, a: Site, b: Site) -> None:
    """Query, key, value and output projections of an attention."""
    parts = {"q": (a.q, b.q), "k": (a.k, b.k), "v": (a.v, b.v)}
    everything = [(n, p) for n, p in a.parts()]
    packed: dict[str, str | None] = {}
    whole_a, whole_b = biases(case.a, a), biases(case.b, b)
    case.biases[b.index] = whole_a, whole_b
    case.added[b.index] = {n: (whole_a[n][1], whole_b[n][1]) for n in whole_b if n in whole_a}
    for name, (pa, pb) in parts.items():
        if not pa or not pb:
            continue
        wa, bias_a = rows_of(pa)[0], whole_a[name][0]
        wb, bias_b = rows_of(pb)[0], whole_b[name][0]
        rows = match_rows(wa, wb, case.tolerance)
        order = pb[0].linear.node
        place = case.place(f"{_kind(a)} {NAMES[name]}", pa[0].linear.node, pb[0].linear.node)
        place = dataclasses.replace(place, layer=layer_of(case.a, a.query))  # memory is another stack's
        if rows.complete and wa.shape == wb.shape:
            case.rows[("site", b.index, name)] = rows
            _bias(case, "bias-missing", place, rows, bias_a, bias_b, pa, pb, order, site=(a, b))
            continue
        case.rows[("site", b.index, name)] = None
        others = torch.cat(
            [rows_of([p])[0] for _, p in everything if p.linear.weight.shape[1] == wb.shape[1]]
        )
        among = match_rows(others, wb, case.tolerance)
        if wa.shape == wb.shape and among.complete:
            packed[name] = whose_rows(everything, wb.shape[1], among.index)
            if name == "q":  # what stands for the queries is laid out as it is by the rotation
                case.rows[("site", b.index, name)] = _repeated(case, b, among.index)
            if len(others) == sum(len(whole_a[n][0]) for n in whole_a):
                everywhere = torch.cat([whole_a[n][0] for n in parts if n in whole_a])
                _bias(case, "bias-missing", place, among, everywhere, bias_b, pa, pb, order, site=(a, b))
        elif wa.shape != wb.shape and len(wb) > len(wa) and bool((among.index >= 0).all()):
            words = f"makes it of {len(wa)} columns", f"makes it of {len(wb)}, other projections' too"
            case.add("unexplained", place, *words, order)
        else:
            _foreign(case, place, pa, wa, wb, order)
    _within_heads(case, b)
    if packed:
        place = case.place(f"{_kind(a)} projections", a.q[0].linear.node, b.q[0].linear.node)
        case.add("qkv-packing", place, *told(a, b, packed), b.q[0].linear.node, parts=list(packed))
    if a.out is not None and b.out is not None:
        case.rows[("site", b.index, "out")] = _out(
            case, f"{_kind(a)} output projection", a.out, b.out, (a, b)
        )


def _within_heads(case: Case, site: Site) -> None:
    """Queries whose rows are none of A's are laid out like the keys within a head, and the reverse."""
    for name, other, parts in (("q", "k", site.q), ("k", "q", site.k)):
        known = _rows(case, site, other)
        if not parts or known is None or _rows(case, site, name) is not None:
            continue
        size = sum(len(p.columns) for p in parts)
        case.rows[("site", site.index, name)] = _repeated(case, site, known.index, size)


def _repeated(case: Case, site: Site, index: Tensor, size: int | None = None) -> Rows | None:
    """Rows that are laid out within every head as in the first one of these."""
    width, size = case.b.graph.values[site.query].shape[-1], size or len(index)
    first = index[:width] % width
    if size % width or not torch.equal(first.sort().values, torch.arange(width)):
        return None
    index = torch.cat([first + width * head for head in range(size // width)])
    return Rows(index, torch.ones(size, dtype=torch.float64))


def check_inner(case: Case, a: Inner, b: Inner) -> None:
    """The maps of a feed-forward network."""
    pa, pb = a.parts, b.parts
    wa, bias_a = rows_of(pa)
    wb, bias_b = rows_of(pb)
    rows = match_rows(wa, wb, case.tolerance)
    whose = b.whose or a.whose
    place = case.place("feed-forward input projection" + whose, a.sources[0].node, b.sources[0].node)
    if rows.complete and wa.shape == wb.shape:
        case.rows[("inner", b.index)] = rows
        _bias(case, "bias-missing", place, rows, bias_a, bias_b, pa, pb, b.sources[0].node)
    else:
        case.rows[("inner", b.index)] = None
        if not (rows.index >= 0).all() or wa.shape != wb.shape:
            _foreign(case, place, pa, wa, wb, b.sources[0].node)
    last = case.b.structure.tops(case.b.graph.output) == [b.out.out]
    part = "output head" if last else "feed-forward output projection" + whose
    case.rows[("inner", b.index, "out")] = _out(case, part, a.out, b.out, None)


def check_other(case: Case, a: Linear, b: Linear, last: bool) -> None:
    """A projection outside of layers: the output head, a pooler."""
    part = "output head" if last else "projection"
    place = case.place(part, a.node, b.node)
    if a.weight.shape != b.weight.shape:
        case.add(
            "decode-protocol" if a.weight.shape[1] == b.weight.shape[1] else "unexplained",
            place,
            f"maps to {a.weight.shape[0]} outputs",
            f"maps to {b.weight.shape[0]}",
            b.node,
        )
        return
    rows = match_rows(a.weight, b.weight, case.tolerance)
    if not rows.complete or (not rows.plain and bool((rows.index != torch.arange(len(rows.index))).any())):
        _foreign(case, place, whole([a]), a.weight, b.weight, b.node)
        rows = Rows(torch.arange(a.weight.shape[0]), torch.ones(a.weight.shape[0], dtype=torch.float64))
    case.rows[("other", b.node)] = rows
    kind = "output-bias" if last else "bias-missing"
    _bias(case, kind, place, rows, a.bias, b.bias, whole([a]), whole([b]), b.node)


def _kind(site: Site) -> str:
    return "cross-attention" if site.cross else "self-attention"


def _out(case: Case, part: str, a: Linear, b: Linear, site: tuple[Site, Site] | None) -> Rows | None:
    """The map that writes to the stream: its columns may stand in another order, its rows may not."""
    place = case.place(part, a.node, b.node)
    columns = match_rows(a.weight.t(), b.weight.t(), case.tolerance)
    if a.weight.shape != b.weight.shape or not columns.complete:
        _foreign(case, place, whole([a]), a.weight, b.weight, b.node)
        found = None
    else:
        found = columns
    same = Rows(torch.arange(a.weight.shape[0]), torch.ones(a.weight.shape[0], dtype=torch.float64))
    (ours, joint_a), (theirs, joint_b) = output_bias(case.a, a), output_bias(case.b, b)
    if joint_a or joint_b:  # only the sum of all biases can be compared
        maps_a, maps_b = summed(case.a, a)[1], summed(case.b, b)[1]
        if maps_b[-1] is not b:
            return found
        ours, theirs = ours if joint_a else total(maps_a), theirs if joint_b else total(maps_b)
    if ours.shape == theirs.shape and not (site is not None and _folded(case, site, theirs - ours)):
        kind = "output-bias" if part == "output head" else "bias-missing"
        parts, joint = (whole([a]), whole([b])), joint_a or joint_b
        _bias(case, kind, place, same, ours, theirs, *parts, b.node, joint=joint)
    return found


def _folded(case: Case, site: tuple[Site, Site], shift_out: Tensor) -> bool:
    """The value bias went into the output bias: weights sum to one, so that is the same function."""
    a, b = site
    if a.out is None or b.out is None or not a.v or not b.v:
        return False
    shift = _rows(case, b, "v")
    if shift is None:
        return False
    (bias_a, _), (bias_b, _) = (found["v"] for found in case.biases[b.index])
    missing = bias_b - shift.scale * bias_a[shift.index]
    value = values_of(case.b, b.v)
    if value is None or float(missing.abs().max()) == 0:
        return False
    given: dict[int, Tensor] = {}
    filled(case.b, b.v, value - missing, given)
    before, after = case.b.graph.values[b.out.read], case.b.graph.evaluate(b.out.read, given)
    move = ((after - before) @ b.out.weight.t()).reshape(-1, b.out.weight.shape[0])
    folded = gap(move, shift_out.expand_as(move)) < 1e-5
    if folded:
        case.raw = [r for r in case.raw if not (r.kind == "bias-missing" and r.order == b.v[0].linear.node)]
    return folded


def _rows(case: Case, site: Site, name: str) -> Rows | None:
    return case.rows.get(("site", site.index, name))


def _bias(
    case: Case,
    kind: str,
    place: object,
    rows: Rows,
    a: Tensor,
    b: Tensor,
    parts_a: list[Part],
    parts_b: list[Part],
    order: int,
    site: tuple[Site, Site] | None = None,
    joint: bool = False,
) -> None:
    expected = rows.scale * a[rows.index]
    size = float(torch.maximum(expected.abs().max(), b.abs().max()))
    # A sum of biases that is kept as one has been rounded as the parameters are.
    kept = torch.finfo(case.stored).eps if joint else 0.0
    near = max(1e-6, case.constants, kept) * size
    if size == 0 or float((expected - b).abs().max()) <= near:
        return
    if site is not None and not _seen(case, site[1], parts_b, b - expected):
        return
    none_a, none_b = (float(x.abs().max()) <= NOTHING * size for x in (a, b))
    if none_a or none_b:
        case.add(
            kind,
            place,  # type: ignore[arg-type]
            "adds no bias" if none_a else "adds a bias",
            "adds no bias" if none_b else "adds one",
            order,
            largest=size,
            tensors=_bias_names(parts_b if none_a else parts_a),
        )
    elif _multiple(expected, b) is not None:
        times = _multiple(expected, b)
        case.add(kind, place, "adds a bias", f"adds it {times:.6g} times", order, largest=size)  # type: ignore[arg-type]
    else:
        other = (expected - b).abs() > near
        evidence = {"share_of_outputs": float(other.double().mean()), "largest": size}
        owner = whose(case.a, b)
        drops_a, drops_b = (bool((x[other].abs() <= NOTHING * size).all()) for x in (expected, b))
        words = ("adds a bias", "adds another one")
        if drops_a or drops_b:
            words = (
                ("adds no bias on some of the outputs" if drops_a else words[0]),
                ("adds none on some of the outputs" if drops_b else "adds one on all"),
            )
        case.add(
            kind if drops_a or drops_b else "tie-lost",
            place,  # type: ignore[arg-type]
            *words,
            order,
            **evidence,
            **({} if drops_a or drops_b or owner is None else {"found": owner}),
        )


def _multiple(a: Tensor, b: Tensor) -> float | None:
    ratio = float((a * b).sum() / a.square().sum())
    return ratio if len(a) > 1 and ratio > 0 and gap(a * ratio, b) < 1e-6 else None


def _bias_names(parts: list[Part]) -> list[str]:
    return [name for part in parts for name in part.linear.bias_names]


def _seen(case: Case, site: Site, parts: list[Part], shift: Tensor) -> bool:
    """Whether a shift of these columns changes what attention gives: a key bias without rotation does not."""
    value = values_of(case.b, parts)
    if value is None or site.out is None:
        return True
    given: dict[int, Tensor] = {}
    filled(case.b, parts, value - shift, given)
    before, after = case.b.graph.values[site.out.read], case.b.graph.evaluate(site.out.read, given)
    return gap(before, after) > 1e-9


def _foreign(case: Case, place: object, parts: list[Part], a: Tensor, b: Tensor, order: int) -> None:
    """A matrix that is not the reference's: transposed, from elsewhere, or from nowhere."""
    if b.shape == a.t().shape and gap(a.t(), b) < 1e-6:
        case.add("weight-transpose", place, "applies the matrix", "applies its transpose", order)  # type: ignore[arg-type]
        return
    found = None
    for name, value in _matrices(case.a):
        for form, matrix in (("", value.double()), (" transposed", value.double().t())):
            if matrix.shape[1] == b.shape[1] and match_rows(matrix, b, case.tolerance).complete:
                found = f"{name}{form}"
    if found is None:
        matched = (
            float((match_rows(a, b, case.tolerance).index >= 0).double().mean())
            if a.shape[1] == b.shape[1]
            else 0.0
        )
        candidate = "applies one whose rows are nowhere in it"
        evidence = {"rows_found": matched}
    else:
        candidate, evidence = f"applies {found}", {"found": found}
    names = ", ".join(dict.fromkeys(n for p in parts for n in p.linear.names))
    case.add("tie-lost", place, f"applies {names} of its checkpoint", candidate, order, **evidence)  # type: ignore[arg-type]


def _matrices(model: Model) -> Iterator[tuple[str, Tensor]]:
    """Matrices among the parameters, those of a stack one by one."""
    for name, value in model.parameters.items():
        if value.is_floating_point() and value.dim() == 2:
            yield name, value
        elif value.is_floating_point() and value.dim() == 3:
            yield from ((f"{name}[{i}]", matrix) for i, matrix in enumerate(value))
