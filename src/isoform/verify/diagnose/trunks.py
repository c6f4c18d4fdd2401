"""What is done to a sum of the stream before anything reads it, and what each reader does for itself."""

from __future__ import annotations

from torch import Tensor

from isoform.verify.align import Model
from isoform.verify.diagnose.case import Case
from isoform.verify.diagnose.unary import close, describe


def same_trunks(case: Case) -> None:
    """What is done to a sum once belongs to it also where it has one reader alone in one of the models.

    Where it has several and is read past that by one of them in one model, it belongs to the readers.
    """
    a, b = case.a.structure, case.b.structure
    for key, node_b in case.b.states.items():
        node_a = case.a.states.get(key)
        if node_a is None:
            continue
        alone = [len(s.readers.get(n, [])) < 2 for s, n in ((a, node_a), (b, node_b))]
        bare = [s.trunk.get(n, n) == n for s, n in ((a, node_a), (b, node_b))]
        if bare[0] == bare[1]:
            continue
        given = _given(case, node_a, node_b)
        if bare[1]:
            wanted, model, node = case.a.of_node(a.trunk[node_a]), case.b, node_b
        else:
            end = b.trunk[node_b]
            value = case.b.graph.evaluate(end, given)
            wanted, model, node = case.b.graph.canonical(value, value.shape[-1], end), case.a, node_a
            given = {}
        ends = model.structure.readers.get(node, [])
        found = [_first_equal(case, model, node, end, given, wanted) for end in ends]
        if alone[0] != alone[1] and found == [None]:
            other = (case.a, node_a) if bare[1] else (case.b, node_b)
            found = [_last_alike(*other, model, node, ends[0])]
        common = [n for n in found if n is not None]
        if alone[0] != alone[1] and common:
            model.structure.trunk[node] = common[0]
        elif alone[0] != alone[1] or common:  # what is done there belongs to the readers, then
            a.trunk[node_a], b.trunk[node_b] = node_a, node_b


def _given(case: Case, na: int, nb: int) -> dict[int, Tensor]:
    """A's value at a point of B's stream; token vectors are B's own (a factor may be folded in)."""
    value = case.a.of_node(na)
    if value is None or nb in case.b.structure.entries or case.b.of_node(nb, value.shape[-1]) is None:
        return {}
    return {nb: case.b.graph.shaped(value, nb, value.shape[-1])}


def _first_equal(
    case: Case, model: Model, top: int, end: int, given: dict[int, Tensor], wanted: Tensor | None
) -> int | None:
    """The first node between a sum and one of its readers that has a value."""
    if wanted is None:
        return None
    chain = model.structure.chain(end)
    for node in reversed(chain[: chain.index(top) + 1] if top in chain else []):
        value = model.graph.evaluate(node, given)
        found = model.graph.canonical(value, value.shape[-1], node)
        if found is not None and case.differ(wanted, found, model.role(node)) <= case.tolerance:
            return node
    return None


def _last_alike(other: Model, state: int, model: Model, top: int, end: int) -> int | None:
    """The last node between a sum and its reader up to which another model's norms are applied."""
    value = other.of_node(state)
    if value is None:
        return None
    way = other.structure.trunk[state], model.structure.chain(end)
    norms = [s.gain for s in describe(other, state, way[0], value.shape[-1], value.shape)]
    for node in way[1][: way[1].index(top)] if top in way[1] else []:
        steps = describe(model, top, node, value.shape[-1], value.shape)
        if len(steps) == len(norms) and all(
            s.gain is not None and n is not None and close(s.gain, n, 1e-4)
            for s, n in zip(steps, norms, strict=True)
        ):
            return node
    return None
