"""Choices of experts in a dataflow, and the networks that they choose among."""

from __future__ import annotations

import heapq

from isoform.verify.diagnose.graph import Graph
from isoform.verify.diagnose.parts import Inner, Linear, Router

_CHOICES = ("topk", "sort", "argmax", "max")


EXPERTS = 1_000_000
"""Numbers of experts' networks begin here: no other network has so many before it."""


def find_routers(graph: Graph, linears: list[Linear]) -> list[Router]:
    """Choices among the outputs of a linear map, and what hangs on them."""
    found: list[Router] = []
    by_out = {linear.out: linear for linear in linears}
    for number in sorted(graph.useful):
        node = graph.nodes[number]
        if node.op not in _CHOICES or (node.op == "max" and len(node.args) < 2) or not graph.args(number):
            continue
        read = graph.args(number)[0]
        tops = [read] if read in by_out else graph.sources(read, by_out)
        if len(tops) != 1 or any(r.choice == number - 1 for r in found):
            continue
        linear = by_out[tops[0]]
        width = linear.weight.shape[0]
        if graph.values[read].shape[-1] != width or any(r.linear is linear for r in found):
            continue
        tokens = graph.values[read].numel() // width
        end = _together(graph, number, linear.weight.shape[1], tokens)
        if end is None:
            continue
        before, inside = graph.ancestors([number]), graph.ancestors([end])
        experts = [x for x in linears if x.node in inside and x.node not in before]
        found.append(Router(linear, number, end, experts))
    return found


def expert_networks(graph: Graph, routers: list[Router]) -> list[Inner]:
    found: list[Inner] = []
    for router in routers:
        by_out = {linear.out: linear for linear in router.experts}
        for linear in router.experts:
            tops = graph.sources(linear.read, by_out)
            if tops:
                found.append(Inner(EXPERTS + len(found), linear, [by_out[t] for t in tops]))
    return found


def _together(graph: Graph, number: int, width: int, tokens: int) -> int | None:
    """The first node with one vector a token, as wide as the stream, that all that is chosen goes through."""
    starts = {n for n in (number, number + 1) if n in graph.useful and graph.nodes[n].call is not None}
    starts = {n for n in starts if n == number or graph.nodes[n].args == graph.nodes[number].args}
    heap = sorted({user for n in starts for user in graph.users.get(n, [])})
    seen = set(heap)
    while heap:
        at = heapq.heappop(heap)
        value = graph.values[at]
        vectors = value.shape[-1:] == (width,) and value.numel() == tokens * width
        if not heap and value.is_floating_point() and vectors:
            return at
        for user in graph.users.get(at, []):
            if user not in seen:
                seen.add(user)
                heapq.heappush(heap, user)
    return None
