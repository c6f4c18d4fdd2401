"""A product that is split before biases are added to its pieces: each piece is a linear map of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from isoform.verify.diagnose.graph import Graph
from isoform.verify.diagnose.parts import Linear
from isoform.verify.diagnose.rerun import VIEWS

MOST = 64
"""Ways that are followed."""

MOVES = VIEWS | {
    *("permute", "transpose", "t", "expand"),
    *("split", "split_with_sizes", "unbind", "select", "slice", "narrow", "chunk"),
}
"""Operators that hand numbers on as they are, all or some of them."""


def pieces(graph: Graph, linear: Linear) -> list[Linear]:
    """The maps that the pieces of a product without a bias are; none where nothing is added to them.

    Biases may be added to pieces, or to the whole while its pieces lie along an axis of their own.
    """
    found: dict[int, tuple[Tensor, Linear]] = {}
    for nodes in branches(graph, linear.node, lambda n: _piece(graph, linear, n) is not None):
        piece = next(((n, p) for n in nodes if (p := _piece(graph, linear, n)) is not None), None)
        if piece is None:
            return []
        found[piece[0]] = piece[1]
    taken = torch.cat([columns for columns, _ in found.values()]) if found else torch.empty(0)
    once = torch.equal(taken.sort().values, torch.arange(len(linear.weight)))
    return [piece for _, piece in found.values()] if once and len(found) > 1 else []


def branches(graph: Graph, product: int, settled: Callable[[int], bool]) -> list[list[int]]:
    """For each way that a product's numbers go the nodes they stand in alone; none if nothing is added.

    Args:
        graph: the model.
        product: the node.
        settled: whether a sum with parameters is the end of its way, or is split further.
    """
    ways = _ways(graph, product, settled)
    before = {n for way in ways if _added(graph, way) for n in way}
    found: list[list[int]] = []
    for way in ways if before else []:
        added = next((i for i, n in enumerate(way) if graph.nodes[n].op == "add"), None)
        found.append([n for n in way if n not in before] if added is None else way[added:])
    return found if all(found) else []


def _ways(graph: Graph, product: int, settled: Callable[[int], bool]) -> list[list[int]]:
    """Ways through what moves, splits and adds parameters."""
    found: list[list[int]] = []
    stack = [[product]]
    while stack:
        way = stack.pop()
        users = [n for n in graph.users.get(way[-1], []) if graph.values[n].numel()]
        onward = [n for n in users if _moves(graph, n) or (_adds(graph, n) and not _added(graph, way))]
        if _added(graph, way) and settled(way[-1]):
            onward = []
        elif any(graph.nodes[n].op == "add" for n in onward) and len(users) > 1:
            return []  # read both as it is and with something added
        if onward and len(found) + len(stack) + len(onward) <= MOST:
            stack += [[*way, n] for n in reversed(onward)]
        else:
            found.append(way)
    return found


def _moves(graph: Graph, number: int) -> bool:
    return graph.nodes[number].op in MOVES and len(graph.live_args(number)) == 1


def _adds(graph: Graph, number: int) -> bool:
    """Whether parameters are added, to nothing else."""
    node = graph.nodes[number]
    others = [r for r in node.refs() if not (r.kind == "node" and graph.live[int(r.name)])]
    if node.op != "add" or len(graph.live_args(number)) != 1 or len(others) != 1:
        return False
    return others[0].kind == "parameter" or (
        others[0].kind == "node"
        and graph.static[int(others[0].name)]
        and bool(graph.parameters([int(others[0].name)]))
    )


def _added(graph: Graph, way: list[int]) -> bool:
    return any(graph.nodes[n].op == "add" for n in way)


def _piece(graph: Graph, linear: Linear, node: int) -> tuple[Tensor, Linear] | None:
    """The piece that stands in a node, and its columns; None: it has no clear layout."""
    columns = _columns(graph, linear, node)
    if columns is None:
        return None
    shape = graph.values[linear.node]
    shift = graph.canonical(graph.evaluate(node, {linear.node: torch.zeros_like(shape)}), len(columns), node)
    if shift is None or not torch.equal(shift, shift[:1, :1].expand_as(shift)):
        return None
    names = [n for n in graph.parameters(graph.region(node, [linear.node])) if n not in linear.names]
    bias, rows = shift[0, 0], linear.weight[columns]
    has = bool(names)
    return columns, Linear(
        linear.node, node, linear.read, rows, bias, has, linear.names, names if has else []
    )


def _columns(graph: Graph, linear: Linear, node: int) -> Tensor | None:
    """The columns of a product that stand in a node, in its order; None: another layout than tokens first."""
    value, width = graph.values[linear.node], len(linear.weight)
    if width == 0 or graph.values[node].numel() * width % value.numel():
        return None
    features = graph.values[node].numel() * width // value.numel()
    tokens = torch.arange(value.numel() // width, dtype=torch.float64) * width
    marks = (tokens[:, None] + torch.arange(width)).reshape(value.shape)
    read = []
    for given in (marks, torch.zeros_like(marks)):
        found = graph.canonical(graph.evaluate(node, {linear.node: given}), features, node)
        own = graph.canonical(given, width, linear.node)
        if found is None or own is None:
            return None
        read.append((found, own))
    moved, own = (x - y for x, y in zip(*read, strict=True))
    numbers = moved.round().long()
    columns = numbers % width
    same = torch.equal(columns, columns[:1, :1].expand_as(columns))
    return (
        columns[0, 0]
        if same and torch.equal(numbers - columns, own.long()[..., :1].expand_as(numbers))
        else None
    )
