"""Linear maps in a dataflow: products of content with a matrix that comes from parameters alone."""

from __future__ import annotations

from torch import Tensor

from isoform.verify.diagnose.graph import Graph
from isoform.verify.diagnose.parts import Linear
from isoform.verify.diagnose.pieces import pieces
from isoform.verify.diagnose.rerun import VIEWS


def find_linears(graph: Graph) -> list[Linear]:
    found: list[Linear] = []
    for number in sorted(graph.useful):
        node = graph.nodes[number]
        if node.op not in ("mm", "addmm", "bmm", "baddbmm") or not node.value.is_floating_point():
            continue
        refs = list(node.refs())
        bias_ref = refs[0] if node.op in ("addmm", "baddbmm") else None
        left, right = refs[-2:]
        static = [_is_static(graph, r) for r in (left, right)]
        if static[0] == static[1]:
            continue
        read_ref = right if static[0] else left
        if read_ref.kind != "node" or not graph.live[int(read_ref.name)]:
            continue
        matrix = graph.value(left if static[0] else right)
        if matrix.dim() == 3:
            if matrix.shape[0] > 1 and not bool((matrix == matrix[:1]).all()):
                continue
            matrix = matrix[0]
        if static[0]:
            continue  # a matrix from the left mixes positions, not features
        names = graph.parameters(_static_region(graph, right))
        if right.kind == "parameter":
            names = [str(right.name)]
        if not names:
            continue
        bias = matrix.new_zeros(matrix.shape[1])
        has, bias_names = False, list[str]()
        if bias_ref is not None:
            if not _is_static(graph, bias_ref):
                continue
            bias, has = graph.value(bias_ref).reshape(-1, matrix.shape[1])[0], True
            bias_names = _names(graph, bias_ref)
        out = number
        if not has:
            out, more, bias_names = _with_bias(graph, number, matrix.shape[1])
            if more is not None:
                bias, has = more, True
        linear = Linear(number, out, int(read_ref.name), matrix.t(), bias, has, names, bias_names)
        found += [linear] if has else pieces(graph, linear) or [linear]
    return found


def _is_static(graph: Graph, ref: object) -> bool:
    return ref.kind in ("parameter", "constant") or (ref.kind == "node" and graph.static[int(ref.name)])  # type: ignore[attr-defined]


def _static_region(graph: Graph, ref: object) -> list[int]:
    return [int(ref.name)] if ref.kind == "node" else []  # type: ignore[attr-defined]


def _names(graph: Graph, ref: object) -> list[str]:
    return [str(ref.name)] if ref.kind == "parameter" else graph.parameters(_static_region(graph, ref))  # type: ignore[attr-defined]


def _with_bias(graph: Graph, number: int, width: int) -> tuple[int, Tensor | None, list[str]]:
    """Follow a product to the parameter vector that is added to it next, if one is."""
    at = number
    while True:
        users = list(graph.users.get(at, []))
        if len(users) != 1:
            return number, None, []
        user = graph.nodes[users[0]]
        if user.op in VIEWS or _keeps_features(graph, at, users[0]):
            at = users[0]
            continue
        if user.op != "add":
            return number, None, []
        others = [r for r in user.refs() if not (r.kind == "node" and int(r.name) == at)]
        if len(others) != 1 or not _is_static(graph, others[0]) or not _names(graph, others[0]):
            return number, None, []
        vector = graph.value(others[0])
        if vector.numel() != width or graph.values[users[0]].shape != graph.values[at].shape:
            return number, None, []
        return users[0], vector.reshape(-1), _names(graph, others[0])


def _keeps_features(graph: Graph, number: int, permuted: int) -> bool:
    """Whether axes are exchanged and the last one (of more than one place) stays the last one."""
    node, shape = graph.nodes[permuted], graph.values[number].shape
    order = list(range(len(shape)))
    if node.op == "permute":
        order = [int(i) % len(shape) for i in node.args[1]]
    elif node.op == "transpose":
        i, j = (int(i) % len(shape) for i in node.args[1:3])
        order[i], order[j] = order[j], order[i]
    else:
        return False
    wide = [i for i in order if shape[i] != 1]
    return bool(wide) and wide[-1] == max(wide)
