"""Attentions in a dataflow: a softmax over a product of two activations, and a product with a third."""

from __future__ import annotations

import torch

from isoform.verify.derivatives import derivatives
from isoform.verify.diagnose.graph import Graph
from isoform.verify.diagnose.parts import Linear, Part, Site


def find_sites(graph: Graph, linears: list[Linear], stops: set[int]) -> list[Site]:
    found: list[Site] = []
    by_out = {linear.out: linear for linear in linears}
    for number in sorted(graph.useful):
        argument = _softmax_argument(graph, number)
        if argument is None:
            continue
        logits = _logits(graph, argument)
        scores = _product_before(graph, number, stops)
        mix = _product_after(graph, number, stops)
        if scores is None or mix is None:
            continue
        refs = [int(r.name) for r in graph.nodes[scores].refs() if r.kind == "node"][-2:]
        mixed = [int(r.name) for r in graph.nodes[mix].refs() if r.kind == "node"][-2:]
        weights = next((n for n in mixed if number in graph.region(n, stops)), mixed[0])
        value = next(n for n in mixed if n != weights)
        query, key, columns = _queries_and_keys(graph, logits, refs[0], refs[1])
        ends = (number, logits, scores, query, key, columns, mix, value, weights)
        site = Site(len(found), *ends, None, [], [], [])
        site.q = parts_of(graph, site.query, stops, by_out)
        site.k = parts_of(graph, site.key, stops, by_out)
        site.v = parts_of(graph, site.value, stops, by_out)
        for linear in linears:
            if linear.node > mix and mix in graph.region(linear.read, stops):
                site.out = linear
                break
        site.cross = bool(site.q and site.k) and _cross(graph, site)
        found.append(site)
    return found


def _softmax_argument(graph: Graph, number: int) -> int | None:
    """The argument of a softmax, also of one that is written out: exp(x) / Σ exp(x), or / (… + Σ exp(x))."""
    node, live = graph.nodes[number], graph.live_args(number)
    if not graph.live[number]:
        return None
    if node.op in ("_softmax", "_safe_softmax"):
        return live[0]
    if node.op != "div" or len(live) != 2 or graph.nodes[live[0]].op != "exp":
        return None
    below = live[1]
    if graph.nodes[below].op == "add":  # something more takes a share
        below = next((n for n in graph.live_args(below) if graph.nodes[n].op == "sum"), below)
    total = graph.nodes[below]
    inner = graph.live_args(below)
    if total.op != "sum" or total.value.shape[-1] != 1 or not inner or graph.nodes[inner[0]].op != "exp":
        return None
    arguments = [graph.live_args(n) for n in (live[0], inner[0])]
    return arguments[0][0] if arguments[0] == arguments[1] else None


def over_keys(graph: Graph, softmax: int) -> bool:
    """Whether a softmax adds up to one over its last axis."""
    node = graph.nodes[softmax]
    return node.op == "div" or int(node.args[1]) % node.value.dim() == node.value.dim() - 1


def _logits(graph: Graph, number: int) -> int:
    """Back over what a softmax takes no notice of: the largest of each row that is subtracted first."""
    node = graph.nodes[number]
    live = graph.live_args(number)
    if node.op in ("sub", "add") and live and live[0] == graph.args(number)[0]:
        rows = [r for r in list(node.refs())[1:] if r.kind == "node" and graph.values[int(r.name)].dim()]
        if rows and all(graph.values[int(r.name)].shape[-1] == 1 for r in rows):
            return _logits(graph, live[0])
    return number


def _cross(graph: Graph, site: Site) -> bool:
    q, k = (graph.values[part[0].linear.read].reshape(-1).nan_to_num() for part in (site.q, site.k))
    return not torch.equal(q, k)


def _product_before(graph: Graph, softmax: int, stops: set[int]) -> int | None:
    products = [
        n
        for n in graph.region(softmax, stops)
        if graph.nodes[n].op in ("bmm", "baddbmm", "mm") and len(graph.live_args(n)) >= 2
    ]
    # The nearest: one that no other product on the way reads.
    for number in reversed(products):
        return number
    return None


def _product_after(graph: Graph, softmax: int, stops: set[int]) -> int | None:
    queue, seen = [softmax], {softmax}
    while queue:
        number = queue.pop(0)
        for user in graph.users.get(number, []):
            if user in seen or user in stops:
                continue
            seen.add(user)
            if graph.nodes[user].op in ("bmm", "baddbmm", "mm") and len(graph.live_args(user)) >= 2:
                return user
            queue.append(user)
    return None


def _queries_and_keys(graph: Graph, logits: int, left: int, right: int) -> tuple[int, int, bool]:
    """Which operand of the product varies along the softmax's rows: that one are the queries."""
    a = graph.values[left].clone().requires_grad_()
    scores = graph.evaluate(logits, {left: a})
    pick = torch.zeros_like(scores)
    flat = pick.view(-1, *scores.shape[-2:]) if scores.dim() >= 3 else pick[None]
    flat[0, 0, :] = 1.0  # one query, every key
    pick.masked_fill_(~scores.isfinite(), 0.0)
    (grad,) = torch.autograd.grad(scores, a, pick)
    # Rows of the left operand that this query's scores read: in one head, where heads are mixed.
    rows = (grad.abs().sum(-1) > 0).reshape(-1, a.shape[-2]).sum(-1).max()
    if int(rows) <= 1 or a.shape[-2] == 1:
        return left, right, True
    return right, left, False


def parts_of(graph: Graph, operand: int, stops: set[int], by_out: dict[int, Linear]) -> list[Part]:
    """The columns of linear results that a node depends on."""
    sources = [n for n in ([operand] if operand in stops else graph.sources(operand, stops)) if n in by_out]
    if not sources:
        return []
    generator = torch.Generator().manual_seed(0)
    used = {n: torch.zeros(by_out[n].weight.shape[0], dtype=torch.float64) for n in sources}
    for sign in (1.0, -1.0):  # what is cut off at zero is used on the other side
        leaves = {n: (sign * graph.values[n].detach()).requires_grad_() for n in sources}
        value = graph.evaluate(operand, leaves)
        weight = torch.randn(value.shape, generator=generator, dtype=value.dtype)
        grads = derivatives((value * weight).sum(), list(leaves.values()))
        for number, grad in zip(sources, grads, strict=True):
            if grad is not None:
                used[number] += grad.nan_to_num().reshape(-1, len(used[number])).abs().sum(0)
    parts: list[Part] = []
    for number, share in used.items():
        columns = (share > 0).nonzero()[:, 0]
        if len(columns):
            parts.append(Part(by_out[number], columns))
    return parts
