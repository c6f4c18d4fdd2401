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
from isoform.verify.rows import Rows, match_rows, rows_of, whole

Values = dict[str, Tensor]


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
    for one, two in _wires(a, b):
        _vectors(a, b, one, two, ours, theirs, generator)
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
    """Parameters that are added to content, one number a feature, whatever axes they have."""
    graph, found = model.graph, set[str]()
    tokens = {graph.batch * length for length in graph.lengths.values()}
    for number in graph.useful:
        node = graph.nodes[number]
        static = [n for n in graph.args(number) if graph.static[n]]
        names = [str(r.name) for r in node.refs() if r.kind == "parameter"] + graph.parameters(static)
        if node.op == "add" and len(names) == 1 and len(graph.live_args(number)) == 1:
            size = model.recording.parameters[names[0]].numel()
            if any(graph.values[graph.live_args(number)[0]].numel() == n * size for n in tokens):
                found.add(names[0])
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
    # A map that is used twice has its bias already.
    had_a, had_b = _given(one, ours), _given(two, theirs)
    noise = 0.3 * torch.randn(len(wa), generator=generator, dtype=torch.float64)
    if had_a is not None:
        noise = had_a
    elif had_b is not None:
        noise[rows.index] = had_b / rows.scale
    _put_bias(a, one, noise, ours)
    _put_bias(b, two, rows.scale * noise[rows.index], theirs)


def _given(parts: list[Part], values: Values) -> Tensor | None:
    """The biases that some maps have been given, None where they have not."""
    found: list[Tensor] = []
    for part in parts:
        names = part.linear.bias_names
        if len(names) != 1 or names[0] not in values or values[names[0]].numel() != len(part.linear.bias):
            return None
        found.append(values[names[0]].reshape(-1)[part.columns])
    whole_bias = torch.cat(found)
    return whole_bias if bool((whole_bias != 0).all()) else None


def _free(model: Model) -> set[int]:
    """Sizes of parameters that are all zero and neither a map's bias nor a norm's: biases added elsewhere."""
    taken = {name for linear in model.structure.linears for name in linear.bias_names}
    for top, end in model.structure.trunk.items():
        taken |= set(_used(model, end, top))
    for read in model.reads.values():
        for top in model.structure.tops(read):
            taken |= set(_used(model, read, model.structure.trunk.get(top, top)))
    parameters = model.recording.parameters
    free = (parameters[n] for n in model.recording.trained if n in parameters and n not in taken)
    return {p.numel() for p in free if bool((p == 0).all())}


def _elsewhere(parts: list[Part], free: set[int]) -> bool:
    """Whether maps without a bias may get one further on."""
    return any(not p.linear.has_bias and len(p.columns) in free for p in parts)


def _put_bias(model: Model, parts: list[Part], noise: Tensor, values: Values) -> None:
    at = 0
    for part in parts:
        names, width = part.linear.bias_names, len(part.columns)
        if part.linear.has_bias and len(names) == 1:
            name = names[0]
            old = values.get(name, model.recording.parameters[name].double())
            if old.numel() == part.linear.weight.shape[0]:
                new = old.clone().reshape(-1)
                new[part.columns] = noise[at : at + width]
                values[name] = new.reshape(old.shape)
        at += width


def _wires(a: Model, b: Model) -> list[tuple[list[str], list[str]]]:
    """Vectors of parameters used between points of the stream that correspond, in order of use."""
    found: list[tuple[list[str], list[str]]] = []
    for key, node in a.states.items():
        other = b.states.get(key)
        if other is not None:
            ends = a.structure.trunk.get(node, node), b.structure.trunk.get(other, other)
            found.append((_used(a, ends[0], node), _used(b, ends[1], other)))
    for key, node in a.reads.items():
        other = b.reads.get(key)
        if other is None:
            continue
        sides: list[list[str]] = []
        for model, read in ((a, node), (b, other)):
            tops = model.structure.tops(read)
            top = model.structure.trunk.get(tops[0], tops[0]) if len(tops) == 1 else read
            sides.append(_used(model, read, top))
        found.append((sides[0], sides[1]))
    for x, y in pairs(a.structure.sites, b.structure.sites):
        for one, two in ((x.query, y.query), (x.key, y.key)):
            found.append((_used(a, one, None), _used(b, two, None)))
    return found


def _used(model: Model, target: int, source: int | None) -> list[str]:
    if target == source:
        return []
    graph = model.graph
    stops = model.structure.stops if source is None else {source}
    found: dict[str, None] = {}

    def visit(number: int) -> None:
        for ref in graph.nodes[number].refs():
            if ref.kind == "parameter":
                found[str(ref.name)] = None
            elif ref.kind == "node" and not graph.live[int(ref.name)]:
                visit(int(ref.name))

    for number in graph.region(target, stops):
        visit(number)
    parameters = model.recording.parameters
    return [n for n in found if n in model.recording.trained and parameters[n].dim() == 1]


def _vectors(
    a: Model,
    b: Model,
    one: list[str],
    two: list[str],
    ours: Values,
    theirs: Values,
    generator: torch.Generator,
) -> None:
    """Gains and biases of norms that are all one or all zero."""
    flat = [[n for n in names if _constant(m, n) is not None] for m, names in ((a, one), (b, two))]
    if len(one) != len(two):
        return
    for x, y in zip(one, two, strict=True):
        if x not in flat[0] or y not in flat[1]:
            continue
        if x in ours or y in theirs:  # a norm that is used twice
            ours.setdefault(x, theirs.get(y, a.recording.parameters[x].double()))
            theirs.setdefault(y, ours[x])
            continue
        value_a, value_b = a.recording.parameters[x].double(), b.recording.parameters[y].double()
        if value_a.shape != value_b.shape:
            continue
        noise = 0.3 * torch.randn(value_a.shape, generator=generator, dtype=torch.float64)
        ours[x], theirs[y] = value_a + noise, value_b + noise


def _constant(model: Model, name: str) -> float | None:
    value = model.recording.parameters[name]
    return float(value[0]) if bool((value == value[0]).all()) else None


def reweighted(model: Model, values: Mapping[str, Tensor]) -> Model:
    """The model with other parameters."""
    return Model(model.recording, model.graph.rounding, parameters=values)
