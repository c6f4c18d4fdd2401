"""Where the numbers of a vector stand among the parameters: alone, or as one row of a stack of layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from isoform.verify.align import Linear, Model
from isoform.verify.diagnose.pieces import MOVES

Values = dict[str, Tensor]


@dataclasses.dataclass(frozen=True, eq=False)
class Stored:
    """A vector of trained numbers.

    Attributes:
        name: the parameter.
        index: for each number its place in the parameter, flattened.
    """

    name: str
    index: Tensor

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        """What tells it from other vectors."""
        return self.name, tuple(self.index.tolist())

    def read(self, model: Model, values: Mapping[str, Tensor]) -> Tensor:
        """The vector, as given or else as the model has it."""
        return _current(model, self.name, values).reshape(-1)[self.index]

    def write(self, model: Model, values: Values, vector: Tensor) -> None:
        """Give it other numbers; the rest of the parameter keeps its own."""
        new = _current(model, self.name, values).clone()
        new.view(-1)[self.index] = vector
        values[self.name] = new


def _current(model: Model, name: str, values: Mapping[str, Tensor]) -> Tensor:
    own = values.get(name)
    return (model.recording.parameters[name].double() if own is None else own).contiguous()


def idle(model: Model, used: list[Stored]) -> set[int]:
    """Sizes of trained vectors that nothing reads, alone or in a stack of which other rows are read."""
    recording = model.recording
    read = {str(r.name) for node in recording.nodes for r in node.refs() if r.kind == "parameter"}
    sizes = {
        value.numel()
        for name, value in recording.parameters.items()
        if name in recording.trained and name not in read and value.dim() == 1
    }
    for name in {s.name for s in used}:
        rows = {s.index for s in used if s.name == name}
        width, value = {len(r) for r in rows}, recording.parameters[name]
        if value.dim() == 2 and width == {value.shape[1]}:
            touched = {int(r[0]) // value.shape[1] for r in rows}
            sizes |= {value.shape[1]} if len(touched) < len(value) else set()
    return sizes


def of_bias(model: Model, linear: Linear) -> Stored | None:
    """Where a map's bias stands; None: it has none, or it is made of several parameters."""
    if not linear.has_bias or len(linear.bias_names) != 1:
        return None
    name, width = linear.bias_names[0], linear.weight.shape[0]
    if model.recording.parameters[name].numel() == width:
        return Stored(name, torch.arange(width))
    graph, zeros = model.graph, torch.zeros_like(model.graph.values[linear.read])

    def run(parameter: Tensor) -> Tensor | None:
        return graph.canonical(
            graph.evaluate(linear.out, {linear.read: zeros}, {name: parameter}), width, linear.out
        )

    numbers = _numbers(model, name)
    found, none = run(numbers), run(torch.zeros_like(numbers))
    return None if found is None or none is None else _stored(name, (found - none)[0, 0])


def vectors(model: Model, target: int, source: int | None) -> list[Stored]:
    """Trained vectors that are used between two points, in order; of a whole region where none is given."""
    if target == source:
        return []
    graph = model.graph
    stops = model.structure.stops if source is None else {source}
    found: dict[tuple[str, tuple[int, ...]], Stored] = {}

    def visit(number: int) -> None:
        node = graph.nodes[number]
        for ref in node.refs():
            vector: Stored | None = None
            if ref.kind == "parameter":
                vector = _whole(model, str(ref.name))
            elif ref.kind == "node" and not graph.live[int(ref.name)]:
                vector = _row(model, int(ref.name))
                if vector is None:
                    visit(int(ref.name))
            if vector is not None:
                found.setdefault(vector.key, vector)

    for number in graph.region(target, stops):
        visit(number)
    return list(found.values())


def _whole(model: Model, name: str) -> Stored | None:
    value = model.recording.parameters[name]
    alone = name in model.recording.trained and value.dim() and value.numel() == value.shape[-1]
    return Stored(name, torch.arange(value.numel())) if alone else None


def _row(model: Model, number: int) -> Stored | None:
    """A node that is one row of a parameter; None: it is none, or something is computed with it."""
    graph = model.graph
    value, above = graph.values[number], number
    while graph.nodes[above].op in MOVES and len(graph.args(above)) == 1:
        above = graph.args(above)[0]
    names = [str(r.name) for r in graph.nodes[above].refs()]
    if graph.nodes[above].op not in MOVES or graph.args(above) or len(names) != 1 or not value.dim():
        return None
    if names[0] not in model.recording.trained or value.numel() != value.shape[-1]:
        return None
    return _stored(names[0], graph.evaluate(number, {}, {names[0]: _numbers(model, names[0])}).reshape(-1))


def _numbers(model: Model, name: str) -> Tensor:
    value = model.recording.parameters[name]
    return torch.arange(1, value.numel() + 1, dtype=torch.float64).reshape(value.shape)


def _stored(name: str, numbers: Tensor) -> Stored | None:
    index = numbers.round().long() - 1
    plain = torch.equal(numbers, index.double() + 1) and bool((index >= 0).all())
    return Stored(name, index) if plain and len(index.unique()) == len(index) else None
