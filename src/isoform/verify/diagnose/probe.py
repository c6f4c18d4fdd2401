"""The same two models with other weights and inputs, on which nothing is hidden.

Zero biases, unit gains, small weights, empty padding rows, short inputs without padding: each lets a fault
pass.
Both recordings are run again with values that break these, the same in both through their correspondence. The
modules themselves are not touched.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from isoform.verify.align import Model, Part
from isoform.verify.diagnose.pairing import pairs
from isoform.verify.diagnose.stored import Stored, Values, idle, of_bias, vectors
from isoform.verify.rows import Rows, match_rows, rows_of, whole


def alike(a: Model, b: Model) -> bool:
    """Whether two models have the same parts, so that their parameters can be paired."""
    return [len(x) for x in (a.structure.sites, a.structure.inners)] == [
        len(x) for x in (b.structure.sites, b.structure.inners)
    ]


def fixed(model: Model) -> bool:
    """Whether a pass left something out that other weights would need: an expert that no token went to."""
    return any(n.op == "nonzero" and n.value.numel() == 0 for n in model.graph.nodes)


def other_weights(a: Model, b: Model) -> tuple[Values, Values]:
    """New values for parameters that hide something, the same in both models where they correspond."""
    ours: Values = {}
    theirs: Values = {}
    factor = _factor(a)
    if factor != 1.0:
        for model, values, biases in zip((a, b), (ours, theirs), _added_in_both(a, b), strict=True):
            for name, value in model.recording.parameters.items():
                if name in model.recording.trained and value.dim() >= 2 and name not in biases:
                    values[name] = value.double() * factor
    generator = torch.Generator().manual_seed(31)
    _tables(a, b, ours, theirs, generator)
    free = _free(a), _free(b)
    for one, two in _maps(a, b):
        if not any(_elsewhere(parts, sizes) for parts, sizes in zip((one, two), free, strict=True)):
            _biases(a, b, one, two, ours, theirs, generator)
    given, wires = (set[object](), set[object]()), _wires(a, b)
    spare = tuple(idle(m, [s for pair in wires for s in pair[i]]) for i, m in enumerate((a, b)))
    for one, two in wires:
        _vectors(a, b, one, two, ours, theirs, given, spare, generator)
    return ours, theirs


def _factor(model: Model) -> float:
    """Bring small weights to a size at which norms, softmax and activations are not linear."""
    sizes = [float(m.weight.square().sum(1).mean().sqrt()) for m in model.structure.linears]
    sizes = sorted(s for s in sizes if s > 0)
    if not sizes:
        return 1.0
    middle = sizes[len(sizes) // 2]
    return 1.0 if middle > 0.4 else 1.2 / middle


def _added_in_both(a: Model, b: Model) -> tuple[set[str], set[str]]:
    """Parameters of each model that hold vectors: its own, and such as are kept together (of all layers)."""
    found = _added(a), _added(b)
    for one, two, known, more in ((a, b, *found), (b, a, *reversed(found))):
        vectors: dict[int, set[bytes]] = {}
        for name in {*known, *one.recording.trained}:
            value = one.recording.parameters.get(name)
            if value is not None and (value.dim() == 1 or name in known):
                vectors.setdefault(value.numel(), set()).add(_bytes(value))
        for name in two.recording.trained:
            value = two.recording.parameters.get(name)
            if value is None or value.dim() < 2 or name in more:
                continue
            for size, held in vectors.items():
                held = held | {_bytes(torch.zeros(size))}  # a part without a bias
                whole = value.numel() % size == 0 and bool(value.any())
                if whole and all(_bytes(row) in held for row in value.reshape(-1, size)):
                    more.add(name)
    return found


def _bytes(value: Tensor) -> bytes:
    return value.detach().reshape(-1).float().contiguous().numpy().tobytes()


def _added(model: Model) -> set[str]:
    """Parameters that are vectors, one number a feature, whatever axes they have and how they are stacked."""
    graph, found = model.graph, set[str]()
    tokens = {graph.batch * length for length in graph.lengths.values()}
    for number in graph.useful:
        node, live = graph.nodes[number], graph.live_args(number)
        if node.op not in ("add", "sub", "mul", "div") or len(live) != 1:
            continue
        size = graph.values[live[0]].numel()
        for ref in node.refs():
            fixed = ref.kind == "parameter" or (ref.kind == "node" and graph.static[int(ref.name)])
            if fixed and any(size == n * graph.value(ref).numel() for n in tokens):
                found |= {str(ref.name)} if ref.kind == "parameter" else {*graph.parameters([int(ref.name)])}
    return found


def _tables(a: Model, b: Model, ours: Values, theirs: Values, generator: torch.Generator) -> None:
    """Rows of the token table that are all zero."""
    for one, two in zip(a.structure.entries, b.structure.entries, strict=False):
        names = [_direct(m, n) for m, n in ((a, one), (b, two))]
        if names[0] is None or names[1] is None:
            continue
        x, y = a.recording.parameters[names[0]], b.recording.parameters[names[1]]
        if x.dim() != 2 or x.shape != y.shape:
            continue
        empty = (x == 0).all(1) & (y == 0).all(1)
        if bool(empty.any()):
            noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            for values, name, table in ((ours, names[0], x), (theirs, names[1], y)):
                values[name] = torch.where(empty[:, None], noise, values.get(name, table.double()))


def _direct(model: Model, node: int) -> str | None:
    names = [str(r.name) for r in model.graph.nodes[node].refs() if r.kind == "parameter"]
    return names[0] if len(names) == 1 else None


def _maps(a: Model, b: Model) -> list[tuple[list[Part], list[Part]]]:
    """Linear maps that correspond."""
    found: list[tuple[list[Part], list[Part]]] = []
    for x, y in pairs(a.structure.sites, b.structure.sites):
        found += [(x.q, y.q), (x.k, y.k), (x.v, y.v)]
        if x.out is not None and y.out is not None:
            found.append((whole([x.out]), whole([y.out])))
    for x, y in pairs(a.structure.inners, b.structure.inners):
        found.append((x.parts, y.parts))
        found.append((whole([x.out]), whole([y.out])))
    heads = [[n for n in m.structure.linears if n.role == "head"] for m in (a, b)]
    found += [(whole([x]), whole([y])) for x, y in zip(*heads, strict=False)]
    return [pair for pair in found if pair[0] and pair[1]]


def _biases(
    a: Model,
    b: Model,
    one: list[Part],
    two: list[Part],
    ours: Values,
    theirs: Values,
    generator: torch.Generator,
) -> None:
    wa, bias_a = rows_of(one)
    wb, bias_b = rows_of(two)
    if wa.shape != wb.shape or float(bias_a.abs().max()) > 0 or float(bias_b.abs().max()) > 0:
        return
    rows = match_rows(wa, wb)
    if not rows.complete:
        rows = Rows(torch.arange(len(wb)), torch.ones(len(wb), dtype=torch.float64))
        if float((wa - wb).abs().max()) > 1e-6 * float(wa.abs().max()):
            return
    held = _held(a, one), _held(b, two)
    if held[0] is None or held[1] is None:
        return
    # A map that is used twice has its bias already.
    had_a, had_b = _given(a, held[0], one, ours), _given(b, held[1], two, theirs)
    noise = 0.3 * torch.randn(len(wa), generator=generator, dtype=torch.float64)
    if had_a is not None:
        noise = had_a
    elif had_b is not None:
        noise[rows.index] = had_b / rows.scale
    _put_bias(a, one, held[0], noise, ours)
    _put_bias(b, two, held[1], rows.scale * noise[rows.index], theirs)


def _held(model: Model, parts: list[Part]) -> list[Stored | None] | None:
    """For each part where its map's bias stands, if it has one; None: of one that is not known."""
    found = [of_bias(model, part.linear) for part in parts]
    known = all(x is not None or not p.linear.has_bias for x, p in zip(found, parts, strict=True))
    return found if known else None


def _given(model: Model, held: list[Stored | None], parts: list[Part], values: Values) -> Tensor | None:
    """The biases that some maps have been given, None where they have not."""
    found: list[Tensor] = []
    for part, stored in zip(parts, held, strict=True):
        if stored is None or stored.name not in values:
            return None
        found.append(stored.read(model, values)[part.columns])
    whole_bias = torch.cat(found)
    return whole_bias if bool((whole_bias != 0).all()) else None


def _free(model: Model) -> set[int]:
    """Sizes of vectors that are all zero and added neither by a map nor in the stream: biases, further on."""
    graph, trunk = model.graph, model.structure.trunk
    taken = {linear.out for linear in model.structure.linears}
    ways = [(end, [top]) for top, end in trunk.items()]
    ways += [(n, [trunk.get(t, t) for t in model.structure.tops(n)]) for n in model.reads.values()]
    for end, tops in ways:
        taken |= set() if end in tops else set(graph.region(end, tops))
    found: set[int] = set()
    for number in graph.useful - taken:
        node = graph.nodes[number]
        if node.op != "add" or len(graph.live_args(number)) != 1:
            continue
        for ref in node.refs():
            fixed = ref.kind == "node" and graph.static[int(ref.name)]
            names = (
                [str(ref.name)]
                if ref.kind == "parameter"
                else graph.parameters([int(ref.name)] if fixed else [])
            )
            if any(n in model.recording.trained for n in names) and not bool(graph.value(ref).any()):
                found.add(graph.value(ref).numel())
    return found


def _elsewhere(parts: list[Part], free: set[int]) -> bool:
    """Whether maps without a bias may get one further on."""
    return any(not p.linear.has_bias and len(p.columns) in free for p in parts)


def _put_bias(
    model: Model, parts: list[Part], held: list[Stored | None], noise: Tensor, values: Values
) -> None:
    at = 0
    for part, stored in zip(parts, held, strict=True):
        width = len(part.columns)
        if stored is not None:
            new = stored.read(model, values).clone()
            new[part.columns] = noise[at : at + width]
            stored.write(model, values, new)
        at += width


def _wires(a: Model, b: Model) -> list[tuple[list[Stored], list[Stored]]]:
    """Vectors of parameters used between points of the stream that correspond, in order of use."""
    found: list[tuple[list[Stored], list[Stored]]] = []
    for key, node in a.states.items():
        other = b.states.get(key)
        if other is not None:
            ends = a.structure.trunk.get(node, node), b.structure.trunk.get(other, other)
            found.append((vectors(a, ends[0], node), vectors(b, ends[1], other)))
    for key, node in a.reads.items():
        other = b.reads.get(key)
        if other is None:
            continue
        sides: list[list[Stored]] = []
        for model, read in ((a, node), (b, other)):
            tops = model.structure.tops(read)
            top = model.structure.trunk.get(tops[0], tops[0]) if len(tops) == 1 else read
            sides.append(vectors(model, read, top))
        found.append((sides[0], sides[1]))
    for x, y in pairs(a.structure.sites, b.structure.sites):
        for one, two in ((x.query, y.query), (x.key, y.key)):
            found.append((vectors(a, one, None), vectors(b, two, None)))
    return found


def _vectors(
    a: Model,
    b: Model,
    one: list[Stored],
    two: list[Stored],
    ours: Values,
    theirs: Values,
    given: tuple[set[object], set[object]],
    spare: tuple[set[int], ...],
    generator: torch.Generator,
) -> None:
    """Gains and biases of norms that are all one or all zero; what has been given once stays so.

    A vector that a model reads twice is two equal ones of the other, unless it leaves one of its own unread.
    """
    if len(one) != len(two):
        return
    for x, y in zip(one, two, strict=True):
        value_a, value_b = x.read(a, ours), y.read(b, theirs)
        had = x.key in given[0], y.key in given[1]
        flat = bool((value_a == value_a[0]).all()) or had[0], bool((value_b == value_b[0]).all()) or had[1]
        if not all(flat) or value_a.shape != value_b.shape:
            continue
        noise = 0.3 * torch.randn(value_a.shape, generator=generator, dtype=torch.float64)
        if any(had):
            twice = had[0] != had[1] and len(value_a) in spare[int(had[1])]
            if not had[0]:
                x.write(a, ours, value_a + noise if twice else value_b)
            if not had[1]:
                y.write(b, theirs, value_b + noise if twice else value_a if had[0] else x.read(a, ours))
        else:
            x.write(a, ours, value_a + noise)
            y.write(b, theirs, value_b + noise)
        given[0].add(x.key)
        given[1].add(y.key)


def reweighted(model: Model, values: Mapping[str, Tensor]) -> Model:
    """The model with other parameters."""
    return Model(model.recording, model.graph.rounding, parameters=values)
