"""In front of the stream, where vectors are made of more than a table: convolutions over frames or pieces."""

from __future__ import annotations

from torch import Tensor

from isoform.verify.align import Model
from isoform.verify.diagnose.bodies import ACTIVATIONS, CLOSE
from isoform.verify.diagnose.case import Case
from isoform.verify.diagnose.report import Place
from isoform.verify.diagnose.unary import gap

_UNARY = frozenset(("relu", "gelu", "silu", "tanh", "sigmoid", "elu", "leaky_relu", "mish", "hardswish"))


def explain_front(case: Case, place: Place, na: int, nb: int) -> bool:
    """Whether other activations in A give the first vectors of B; notes which."""
    value = case.a.of_node(na)
    wanted = None if value is None else case.b.of_node(nb, value.shape[-1])
    if wanted is None:
        return False
    graph = case.a.graph
    found = [n for n in sorted(graph.ancestors([na])) if graph.live[n] and graph.nodes[n].op in _UNARY]
    for name in ACTIVATIONS:
        for chosen in (found, *([n] for n in found)):
            out = _with(case.a, na, chosen, name)
            if out is not None and gap(out, wanted) <= CLOSE:
                words = f"applies {_name(case.a, chosen[0])}", f"applies {name}"
                case.add("activation", place, *words, nb, times=len(chosen))
                return True
    return False


def _with(model: Model, end: int, chosen: list[int], name: str) -> Tensor | None:
    """The value of a node with another activation at some nodes."""
    graph, given = model.graph, dict[int, Tensor]()
    for number in chosen:
        given[number] = ACTIVATIONS[name](graph.evaluate(graph.live_args(number)[0], given))
    value = graph.evaluate(end, given)
    return graph.canonical(value, value.shape[-1], end) if given else None


def _name(model: Model, number: int) -> str:
    graph = model.graph
    x, y = graph.values[graph.live_args(number)[0]], graph.values[number]
    return next((n for n, f in ACTIVATIONS.items() if gap(f(x), y) <= CLOSE), graph.nodes[number].op)
