"""The stream between the sublayers: embeddings, sums, norms."""

from __future__ import annotations

from torch import Tensor

from isoform.verify.align import Key
from isoform.verify.diagnose import routing
from isoform.verify.diagnose.biases import in_sum
from isoform.verify.diagnose.case import Case
from isoform.verify.diagnose.front import explain_front
from isoform.verify.diagnose.liveness import LOOKUPS
from isoform.verify.diagnose.trunks import same_trunks
from isoform.verify.diagnose.unary import CLOSE, function, gap
from isoform.verify.diagnose.wires import explain_small, explain_wires
from isoform.verify.diagnose.wiring import RESIDUAL, Wire, explain_wiring, matched, parallel, reading, tops

EXACT = 1e-12
"""Differences above this are more than another order of summation in float64."""


def check(case: Case) -> None:
    """Every point of the stream that both models have, and the places where only one has one."""
    a, b = case.a, case.b
    same_trunks(case)
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
    ordered, count = explain_wiring(case), len(case.raw)
    explain_wires(case, wires)
    if not ordered:  # another part's norm comes with another part
        case.raw[count:] = [r for r in case.raw[count:] if "found" not in r.evidence]
    explain_small(case, case.small)


def check_small(case: Case) -> None:
    """Norms' ε alone, for models whose results hardly differ."""
    a, b = case.a, case.b
    for key, node_b in b.states.items():
        if key in a.states:
            _trunk(case, key, a.states[key], node_b)
    for key, read_b in b.reads.items():
        if key in a.reads:
            _read(case, key, a.reads[key], read_b)
    explain_small(case, case.small)


def _trunk(case: Case, key: Key, na: int, nb: int) -> list[tuple[Wire, Wire]]:
    a, b = case.a, case.b
    ta, tb = a.structure.trunk.get(na, na), b.structure.trunk.get(nb, nb)
    wire = (Wire((*key, "trunk"), "trunk", na, ta), Wire((*key, "trunk"), "trunk", nb, tb))
    value_a, out_a = a.of_node(na), a.of_node(ta)
    if value_a is None or out_a is None:
        return []
    if na in a.structure.by_out or nb in b.structure.by_out:
        return _bare(case, key, (na, ta), (nb, tb))
    if nb in b.structure.entries:
        _entry(case, na, nb)
        own = b.of_node(nb)
        assert own is not None
        value_a = value_a if nb in case.foreign_entries else own  # a factor may be folded into the table
    with case.within((ta, [na]), (tb, [nb])):
        if not _same(case, tb, {nb: value_a}, out_a, "trunk"):
            return [wire]
    if case.checked[-1][2] > EXACT:
        case.small.append(wire)
    return []


def _bare(case: Case, key: Key, ends_a: tuple[int, int], ends_b: tuple[int, int]) -> list[tuple[Wire, Wire]]:
    """From a map's result to where it is read, in one model through a sum with nothing else in it."""
    wires: list[Wire] = []
    runs: list[Tensor] = []
    both = tops(case.a, ends_a[0]), tops(case.b, ends_b[0])
    for model, end, terms in ((case.a, ends_a[1], both[0]), (case.b, ends_b[1], both[1])):
        last = max(terms.values())
        held = tuple(n for n in terms.values() if n != last)
        wires.append(Wire((*key, "trunk"), "trunk", last, end, held))
        value = case.a.of_node(max(both[0].values()))
        found = None if value is None else function(model, last, end, value.shape[-1], held)
        if value is None or found is None:
            return []
        runs.append(found(value))
    same = case.differ(runs[0], runs[1], case.a.role(ends_a[1])) <= case.tolerance
    return [] if same else [(wires[0], wires[1])]


def _entry(case: Case, na: int, nb: int) -> None:
    """Token vectors as they come out of the table."""
    va, vb = case.a.of_node(na), case.b.of_node(nb)
    if va is None or vb is None:
        return
    role = case.a.role(na)
    ratio = float((va * vb).sum() / va.square().sum()) if va.shape == vb.shape else 1.0
    if va.shape == vb.shape and case.differ(va * ratio, vb, role) <= case.tolerance and ratio != 0:
        return
    place = case.place("embedding", na, nb)
    above = case.b.graph.ancestors([nb])
    if any(
        linear.node in above and linear.node == raw.order
        for linear in case.b.structure.linears
        for raw in case.raw
    ):
        case.foreign_entries.add(nb)  # said of the map that makes them
        return
    if va.shape != vb.shape:
        case.add("unexplained", place, f"embeds {list(va.shape)}", f"embeds {list(vb.shape)}", nb)
        return
    off = _shifted_ids(va, vb)
    if off:
        case.foreign_entries.add(nb)
        case.add("decode-protocol", place, "looks up the ids as given", f"looks up ids {off} places on", nb)
        return
    case.foreign_entries.add(nb)
    if not all(m.graph.nodes[n].op in LOOKUPS for m, n in ((case.a, na), (case.b, nb))):
        if explain_front(case, place, na, nb):
            return
        words = "makes its first vectors of the input in one way", "makes them in another"
        case.add("unexplained", place, *words, nb, relative_difference=case.differ(va, vb, role))
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
    if nb not in b.structure.sums or na not in a.structure.sums:
        return []
    terms = matched(a, b, tops(a, na), tops(b, nb))
    if terms is None:
        _other_terms(case, na, nb)
        return []
    tops_a, tops_b = {n: x for n, x, _ in terms}, {n: y for n, _, y in terms}
    given: dict[int, Tensor] = {}
    for _, one, two in terms:
        value = a.of_node(one)
        if value is not None:
            given[two] = value
    out = a.of_node(na)
    with case.within((na, tops_a.values()), (nb, tops_b.values())):
        if out is None or _same(case, nb, given, out, "sum", shifts=(in_sum(a, na), in_sum(b, nb))):
            return []
    if routing.explain(case, tops_a, tops_b, (na, nb)):
        return []
    held_a, held_b = tuple(tops_a.values()), tuple(tops_b.values())
    return [
        (
            Wire((*key, "add", name), "add", tops_a[name], na, held_a),
            Wire((*key, "add", name), "add", node, nb, held_b),
        )
        for name, node in tops_b.items()
    ]


def _other_terms(case: Case, na: int, nb: int) -> None:
    """A sum of other terms in B, all of which A has somewhere: does it come to the same?"""
    a, b, out = case.a, case.b, case.a.of_node(na)
    given: dict[int, Tensor] = {}
    for name, node in tops(b, nb).items():
        own = a.states.get(name, a.sources_at(name))
        value = None if own is None else a.of_node(a.structure.trunk.get(own, own))
        if value is None or name in b.aliases.values():
            return
        given[node] = value
    if parallel(case) & {*tops(a, na), *tops(b, nb)}:
        return  # a branch that reads something else is added elsewhere: said where it reads
    if case.torn or out is None or _same(case, nb, given, out, "sum", shifts=(in_sum(a, na), in_sum(b, nb))):
        return
    words = f"adds up {len(tops(a, na))} contributions here", f"adds up {len(given)}"
    case.add("unexplained", case.place("sum of the stream", na, nb), *words, nb, hint=RESIDUAL)


def _read(case: Case, key: Key, ra: int, rb: int) -> list[tuple[Wire, Wire]]:
    a, b = case.a, case.b
    terms = matched(a, b, reading(a, ra), reading(b, rb))
    value = a.of_node(ra)
    if terms is None or value is None:
        return []
    given: dict[int, Tensor] = {}
    for _, one, two in terms:
        found, own = a.of_node(one), b.of_node(two)
        if found is None or own is None or found.shape[1] != own.shape[1]:
            return []  # of another stream: what is made of it shows in what reads it
        given[two] = found
    wires = [
        (Wire((*key, "read"), "read", one, ra), Wire((*key, "read"), "read", two, rb))
        for _, one, two in terms
    ]
    with case.within((ra, [one for _, one, _ in terms]), (rb, [two for _, _, two in terms])):
        if not _same(case, rb, given, value, "read"):
            return wires
    if case.checked[-1][2] > EXACT:
        case.small += wires
    return []


def _same(
    case: Case,
    target: int,
    given: dict[int, Tensor],
    expected: Tensor,
    what: str,
    *,
    shifts: tuple[Tensor | None, Tensor | None] = (None, None),
) -> bool:
    """Run B's part on A's values and compare at real positions; shifts are compared with the biases."""
    b = case.b
    shaped: dict[int, Tensor] = {}
    for node, value in given.items():
        if b.of_node(node, value.shape[-1]) is None:
            return False
        shaped[node] = b.graph.shaped(value, node, value.shape[-1])
    try:
        out = b.graph.evaluate(target, shaped)
    except (RuntimeError, IndexError):  # sizes that hang on the values: nothing is said here
        case.checked.append((what, target, 0.0))
        return True
    found = b.graph.canonical(out, expected.shape[-1], target)
    if found is None:
        return False
    expected = expected if shifts[0] is None else expected - shifts[0]
    found = found if shifts[1] is None else found - shifts[1]
    difference = case.differ(expected, found, b.role(target))
    case.checked.append((what, target, difference))
    return difference <= case.tolerance
