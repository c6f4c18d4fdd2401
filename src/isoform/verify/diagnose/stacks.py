"""Experts whose maps are kept as one tensor: each one's network is found in the products of all of them.

The second maps are one product of stacks, ``[E, N, f]`` by ``[E, f, d]``. What of the first maps' product
leads to one expert's share of it is asked of the gradient, so it does not matter whether that product is one
of stacks too or one wide matrix, nor in which order its axes stand.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from isoform.verify.derivatives import derivatives
from isoform.verify.diagnose.graph import Graph
from isoform.verify.diagnose.parts import Box, Inner, Linear, Router
from isoform.verify.diagnose.pieces import branches

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


@dataclasses.dataclass(eq=False)
class _Product:
    """A product of content with parameters.

    Attributes:
        node: the product.
        out: where biases have been added to it.
        read: what it multiplies.
        matrices: ``[E, out, in]``, E = 1 for one matrix.
        bias: of the shape of `out`'s value; None: nothing is added.
        left: the matrices stand on the left, so that features come before tokens.
    """

    node: int
    out: int
    read: int
    matrices: Tensor
    bias: Tensor | None
    left: bool
    names: list[str]
    bias_names: list[str]


def stacked_networks(graph: Graph, routers: list[Router], first: int) -> list[Inner]:
    """The networks of experts that are computed together, numbered from ``first`` on."""
    found: list[Inner] = []
    for router in routers:
        before, inside = graph.ancestors([router.choice]), graph.ancestors([router.end])
        products = [p for n in sorted(inside - before) for p in _products(graph, n)]
        by_out = {p.out: p for p in products}
        for last in products:
            tops = [by_out[n] for n in graph.sources(last.read, by_out)]
            if len(last.matrices) < 2 or not tops:
                continue
            for expert in range(len(last.matrices)):
                inner = _network(graph, last, tops, expert, first + len(found))
                if inner is not None:
                    found.append(inner)
    return found


def _products(graph: Graph, number: int) -> list[_Product]:
    """A product with parameters; one for each piece, where it is split before these get biases."""
    node = graph.nodes[number]
    if node.op not in _PRODUCTS or not node.value.is_floating_point():
        return []
    refs = list(node.refs())[-2:]
    static = [r.kind != "node" or graph.static[int(r.name)] for r in refs]
    if static[0] == static[1] or not all(
        s or graph.live[int(r.name)] for r, s in zip(refs, static, strict=True)
    ):
        return []
    ref, other = refs if static[0] else (refs[1], refs[0])
    matrix = graph.value(ref)
    matrix = matrix if matrix.dim() == 3 else matrix[None]
    named = [str(ref.name)] if ref.kind == "parameter" else graph.parameters([int(ref.name)])
    stood = matrix if static[0] else matrix.mT
    found: list[_Product] = []
    for out in _outs(graph, number):
        bias, names = None, list[str]()
        if graph.nodes[out].op in ("add", "addmm", "baddbmm"):
            nothing = {n: torch.zeros_like(graph.values[n]) for n in graph.live_args(number)}
            bias = graph.evaluate(out, nothing)
            names = [n for n in graph.parameters([out]) if n not in named]
        found.append(_Product(number, out, int(other.name), stood, bias, static[0], named, names))
    return found


def _outs(graph: Graph, number: int) -> list[int]:
    """The sums with parameters that a product goes into alone, whole or in pieces; else itself."""
    if graph.nodes[number].op in ("addmm", "baddbmm"):
        return [number]
    return [nodes[0] for nodes in branches(graph, number, lambda _: True)] or [number]


def _network(graph: Graph, last: _Product, tops: list[_Product], expert: int, number: int) -> Inner | None:
    """One expert; None where what it reads of the first maps is not one block of tokens by features."""
    used = [torch.zeros_like(graph.values[p.out]) for p in tops]
    by_first = [torch.zeros_like(x) for x in used]
    tokens = 0
    for sign in (1.0, -1.0):  # what is cut off at zero is used on the other side
        leaves = {p.out: (sign * graph.values[p.out]).detach().clone().requires_grad_() for p in tops}
        share = graph.evaluate(last.read, leaves)
        share = share.reshape(len(last.matrices), *share.shape[-2:])[expert]
        share = share.mT if last.left else share  # [N, f]
        share = share * torch.randn(
            share.shape, generator=torch.Generator().manual_seed(0), dtype=share.dtype
        )
        tokens = len(share)
        for total, rows in ((used, share), (by_first, share[0])):
            for own, grad in zip(total, derivatives(rows.sum(), list(leaves.values())), strict=True):
                own += 0.0 if grad is None else grad.nan_to_num().abs()
    sources: list[Linear] = []
    for product, whole, one in zip(tops, used, by_first, strict=True):
        box = _box(whole != 0, one != 0, tokens)
        if box is None:
            return None
        rows = _rows(graph, product, box)
        if rows is None:
            return None
        weight, bias = rows
        sources.append(_linear(product, weight, bias, box, product.read))
    shape = graph.values[last.read].shape
    tokens, features = (2, 1) if last.left else (1, 2)
    read = Box(_entry(shape, expert), (tokens,), features)
    bias = _bias(graph, last, expert)
    out = _linear(last, last.matrices[expert], bias, read, last.read)
    return Inner(number, out, sources, expert)


def _entry(shape: torch.Size, expert: int) -> tuple[Tensor, ...]:
    return (torch.tensor([expert]), *(torch.arange(n) for n in shape[1:]))


def _linear(product: _Product, weight: Tensor, bias: Tensor | None, box: Box, read: int) -> Linear:
    none = weight.new_zeros(len(weight)) if bias is None else bias
    return Linear(
        product.node,
        product.out,
        read,
        weight,
        none,
        bias is not None,
        product.names,
        product.bias_names,
        box=box,
    )


def _box(used: Tensor, first: Tensor, tokens: int) -> Box | None:
    """The block of a value that is used, with one or two axes of tokens and one of features."""
    sets = [used.movedim(i, 0).flatten(1).any(1).nonzero()[:, 0] for i in range(used.dim())]
    if not all(len(s) for s in sets) or int(used.sum()) < 0.2 * torch.tensor([len(s) for s in sets]).prod():
        return None
    wide = [i for i, s in enumerate(sets) if len(s) > 1]
    ones = [i for i in wide if int(first.movedim(i, 0).flatten(1).any(1).sum()) == 1]
    if len(wide) - len(ones) != 1 or not 1 <= len(ones) <= 2:
        return None
    if torch.tensor([len(sets[i]) for i in ones]).prod() != tokens:
        return None
    return Box(tuple(sets), tuple(ones), next(i for i in wide if i not in ones))


def _rows(graph: Graph, product: _Product, box: Box) -> tuple[Tensor, Tensor | None] | None:
    """The rows of its matrices that make a block of a product's value, and their biases."""
    bias = None if product.bias is None else box.take(product.bias.expand_as(graph.values[product.out]))[0]
    marks = torch.arange(product.matrices.shape[0] * product.matrices.shape[1], dtype=torch.float64)
    marks = marks.reshape(product.matrices.shape[:2])  # [E, out]
    value = graph.values[product.node]
    if value.dim() == 2:
        value = value[None]
    stood = marks[:, :, None] if product.left else marks[:, None, :]
    given = stood.expand_as(value).reshape(graph.values[product.node].shape)
    numbers = box.take(_moved(graph, product, given))[0].round().long()
    flat = product.matrices.reshape(-1, product.matrices.shape[-1])
    if not bool(((numbers >= 0) & (numbers < len(flat))).all()):
        return None
    return flat[numbers], bias


def _bias(graph: Graph, product: _Product, expert: int) -> Tensor | None:
    """The vector that is added to one expert's share of a product of stacks."""
    if product.bias is None:
        return None
    every, first = (torch.zeros_like(graph.values[product.node]) for _ in range(2))
    for marks, tokens in ((every, slice(None)), (first, slice(1))):
        share = marks.reshape(len(product.matrices), *marks.shape[-2:])[expert]
        (share.mT if product.left else share)[tokens] = 1.0
    count = every.shape[-1 if product.left else -2]
    own, one = (_moved(graph, product, marks).round() == 1 for marks in (every, first))
    box = _box(own, one, count)
    rows = None if box is None else box.take(product.bias.expand_as(graph.values[product.out]))
    return rows[0] if rows is not None and bool((rows == rows[0]).all()) else None


def _moved(graph: Graph, product: _Product, value: Tensor) -> Tensor:
    """Where the numbers of a product stand when its bias has been added, without the bias."""
    if product.out == product.node:
        return value
    moved = graph.evaluate(product.out, {product.node: value})
    return moved if product.bias is None else moved - product.bias
