"""The parts of a Transformer, found in the dataflow of any model: linear maps, attention, the stream.

Nothing here knows a module's name or class. A linear map is a product with a matrix that comes from
parameters alone; attention is a softmax over a product of two activations; the stream is where sublayers'
outputs are added to what was there before.
"""

from __future__ import annotations

import dataclasses
import heapq

import torch
from torch import Tensor

from isoform.verify.derivatives import derivatives
from isoform.verify.diagnose.graph import VIEWS, Graph

ROOT = -1


@dataclasses.dataclass(eq=False)
class Linear:
    """One application of a matrix to content.

    Attributes:
        node: the product.
        out: where its result with the bias stands.
        read: the node it reads.
        weight: ``[out, in]``.
        bias: ``[out]``, zero where there is none.
        has_bias: whether there is one.
        names: parameters that the matrix is made of.
        bias_names: those that the bias is made of.
    """

    node: int
    out: int
    read: int
    weight: Tensor
    bias: Tensor
    has_bias: bool
    names: list[str]
    bias_names: list[str]
    role: str = ""


@dataclasses.dataclass(eq=False)
class Part:
    """Some columns of a linear map's result, those that an attention operand is made of."""

    linear: Linear
    columns: Tensor


@dataclasses.dataclass(eq=False)
class Site:
    """One attention.

    Attributes:
        softmax: the node of the softmax.
        logits: its argument, the biased and masked scores, before anything that is the same for all keys.
        scores: the product of queries and keys.
        query, key: operands of that product; ``transposed`` where the product was keys by queries.
        mix: the product of the weights with the values.
        value: its other operand.
        out: the linear map that reads the result.
        q, k, v: where the operands come from.
    """

    index: int
    softmax: int
    logits: int
    scores: int
    query: int
    key: int
    key_columns: bool
    mix: int
    value: int
    weights: int
    out: Linear | None
    q: list[Part]
    k: list[Part]
    v: list[Part]
    cross: bool = False

    def parts(self) -> list[tuple[str, Part]]:
        """Queries, keys and values in this order."""
        return [
            (name, part) for name, parts in (("q", self.q), ("k", self.k), ("v", self.v)) for part in parts
        ]


@dataclasses.dataclass(eq=False)
class Inner:
    """A linear map that reads other linear maps directly: the second one of a feed-forward network."""

    index: int
    out: Linear
    sources: list[Linear]


@dataclasses.dataclass(eq=False)
class Router:
    """A choice of experts for each token.

    Attributes:
        linear: the map to one score an expert.
        choice: the node of the choice (top-k, sort, argmax).
        end: the node where all chosen experts' results have been put together.
        experts: their linear maps.
    """

    linear: Linear
    choice: int
    end: int
    experts: list[Linear]


class Structure:
    """A model's parts.

    Attributes:
        linears: in order of execution.
        sites: attention, in order.
        inners: feed-forward networks, in order.
        entries: nodes where content comes in: token lookups, vectors given from outside.
        states: sums of the stream.
        reads: linear maps that read the stream, and the result if it is read off the stream.
        experts: their feed-forward networks, where each has maps of its own; numbered from `EXPERTS` on.
        routers: choices of experts. The experts' own maps are not among `linears`: which tokens they read is
            decided anew in every run.
        trunk: for each entry or state the node through which everything that reads it goes.
        top: for each node the entry, state or linear result it is a function of alone; ROOT: of several.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.linears = _linears(graph)
        self.routers = find_routers(graph, self.linears)
        self.experts = _expert_networks(graph, self.routers)
        experts = {linear.node for router in self.routers for linear in router.experts}
        self.linears = [linear for linear in self.linears if linear.node not in experts]
        self.by_out = {linear.out: linear for linear in self.linears}
        self.entries = [e for e in graph.entries if e not in {n.node for n in self.linears}]
        self.stops = {*self.by_out, *self.entries}
        self.sites = _sites(graph, self.linears, self.stops)
        mixes = {site.mix for site in self.sites}
        self._dominators()
        for site in self.sites:
            if site.out is not None:
                site.out.role = f"attention {site.index} output"
            for name, part in site.parts():
                part.linear.role = part.linear.role or f"attention {site.index} {name}"
        self.states: list[int] = []
        self.inners: list[Inner] = []
        self.reads: dict[str, tuple[int, Linear | None]] = {}
        self._find_states(mixes)
        outs = {site.out for site in self.sites}
        for linear in self.linears:
            if linear in outs:
                continue
            tops = self.tops(linear.read)
            if tops and all(t in self.by_out for t in tops):
                sources = [self.by_out[t] for t in tops]
                self.inners.append(Inner(len(self.inners), linear, sources))
        for linear in self.linears:
            if linear not in outs and not any(i.out is linear for i in self.inners):
                self.reads[f"linear {linear.node}"] = (linear.read, linear)
        last = self.tops(graph.output) if graph.output not in self.by_out else []
        if any(t not in self.by_out for t in last):
            self.reads["result"] = (graph.output, None)
        self.trunk = self._trunks()
        for inner in self.inners:
            inner.out.role = f"feed-forward {inner.index} output"
            for linear in inner.sources:
                linear.role = linear.role or f"feed-forward {inner.index} input"
        for linear in self.linears:
            linear.role = linear.role or "head"

    def tops(self, node: int) -> list[int]:
        """Entries, states and linear results that a node is made of."""
        if node in self.cut:
            return [node]
        return self.graph.sources(node, self.cut)

    def chain(self, node: int) -> list[int]:
        """Nodes that a node is a function of alone, nearest first, itself included."""
        chain = [node]
        while self.idom.get(chain[-1], ROOT) != ROOT:
            chain.append(self.idom[chain[-1]])
        return chain

    def _dominators(self) -> None:
        graph = self.graph
        self.idom: dict[int, int] = {}
        depth = {ROOT: 0}
        for number in sorted(graph.useful):
            if not graph.live[number]:
                continue
            above = [] if number in self.stops else [n for n in graph.live_args(number) if n in self.idom]
            found = above[0] if above else ROOT
            for other in above[1:]:
                a, b = found, other
                while a != b:
                    if depth[a] >= depth[b]:
                        a = self.idom[a]
                    else:
                        b = self.idom[b]
                found = a
            self.idom[number] = found
            depth[number] = depth[found] + 1
        self.depth = depth

    def _find_states(self, mixes: set[int]) -> None:
        graph = self.graph
        candidates = [
            n
            for n, above in self.idom.items()
            if above == ROOT
            and n not in self.stops
            and graph.nodes[n].op in ("add", "sub", "addcmul", "lerp")
            and len(graph.live_args(n)) >= 2
        ]
        self.cut = {*self.stops, *mixes, *candidates}
        # A sum whose only reader adds something further is a step of that sum.
        for number in candidates:
            users = self._beyond_views(number)
            if len(users) == 1 and users[0] in candidates:
                self.cut.discard(number)
            else:
                self.states.append(number)

    def _beyond_views(self, number: int) -> list[int]:
        users: list[int] = []
        for user in self.graph.users.get(number, []):
            if self.graph.nodes[user].op in VIEWS:
                users += self._beyond_views(user)
            else:
                users.append(user)
        return users

    def _trunks(self) -> dict[int, int]:
        """The deepest node on the way to every reader of a state or entry."""
        readers: dict[int, list[int]] = {}
        ends = [read for read, _ in self.reads.values()] + self.states
        for end in ends:
            starts = [end] if end not in self.states else self._terms(end)
            for start in starts:
                for top in self.tops(start):
                    if top in (*self.states, *self.entries):
                        readers.setdefault(top, []).append(start)
        trunk: dict[int, int] = {}
        for top, nodes in readers.items():
            chains = [list(reversed(self.chain(n))) for n in nodes]
            chains = [c for c in chains if c and c[0] == top]
            if len(nodes) < 2 or len(chains) < len(nodes):
                trunk[top] = top
                continue
            common = top
            for level in zip(*chains, strict=False):
                if len(set(level)) > 1:
                    break
                common = level[0]
            trunk[top] = self._settled(common, top)
        return trunk

    def _terms(self, state: int) -> list[int]:
        """What a sum adds up; of a sum that is only a step of it, its own terms."""
        found: list[int] = []
        for node in self.graph.live_args(state):
            last = self.chain(node)[-1]
            found += [node] if last in self.cut else self._terms(last)
        return found

    def _settled(self, node: int, top: int) -> int:
        """Back over operations that only begin what all readers do anyway (the square of a norm, say)."""
        return node if node == top or self.graph.values[node].shape[-1] > 1 else top


_CHOICES = ("topk", "sort", "argmax", "max")


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
        end = _together(graph, number, linear.weight.shape[1])
        if end is None:
            continue
        before, inside = graph.ancestors([number]), graph.ancestors([end])
        experts = [x for x in linears if x.node in inside and x.node not in before]
        found.append(Router(linear, number, end, experts))
    return found


EXPERTS = 1_000_000
"""Numbers of experts' networks begin here: no other network has so many before it."""


def _expert_networks(graph: Graph, routers: list[Router]) -> list[Inner]:
    found: list[Inner] = []
    for router in routers:
        by_out = {linear.out: linear for linear in router.experts}
        for linear in router.experts:
            tops = graph.sources(linear.read, by_out)
            if tops:
                found.append(Inner(EXPERTS + len(found), linear, [by_out[t] for t in tops]))
    return found


def _together(graph: Graph, number: int, width: int) -> int | None:
    """The first node with vectors of the stream's width that everything made of a choice goes through."""
    starts = {n for n in (number, number + 1) if n in graph.useful and graph.nodes[n].call is not None}
    starts = {n for n in starts if n == number or graph.nodes[n].args == graph.nodes[number].args}
    heap = sorted({user for n in starts for user in graph.users.get(n, [])})
    seen = set(heap)
    while heap:
        at = heapq.heappop(heap)
        if not heap and graph.values[at].is_floating_point() and graph.values[at].shape[-1] == width:
            return at
        for user in graph.users.get(at, []):
            if user not in seen:
                seen.add(user)
                heapq.heappush(heap, user)
    return None


def _linears(graph: Graph) -> list[Linear]:
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
        found.append(Linear(number, out, int(read_ref.name), matrix.t(), bias, has, names, bias_names))
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


def _sites(graph: Graph, linears: list[Linear], stops: set[int]) -> list[Site]:
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
        site.q = _parts(graph, site.query, stops, by_out)
        site.k = _parts(graph, site.key, stops, by_out)
        site.v = _parts(graph, site.value, stops, by_out)
        for linear in linears:
            if linear.node > mix and mix in graph.region(linear.read, stops):
                site.out = linear
                break
        site.cross = bool(site.q and site.k) and _cross(graph, site)
        found.append(site)
    return found


def _softmax_argument(graph: Graph, number: int) -> int | None:
    """The argument of a softmax, also of one that is written out: exp(x) / Σ exp(x)."""
    node, live = graph.nodes[number], graph.live_args(number)
    if not graph.live[number]:
        return None
    if node.op in ("_softmax", "_safe_softmax"):
        return live[0]
    if node.op != "div" or len(live) != 2 or graph.nodes[live[0]].op != "exp":
        return None
    total = graph.nodes[live[1]]
    inner = graph.live_args(live[1])
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
    finite = torch.where(scores.isfinite(), scores, 0.0)
    (grad,) = torch.autograd.grad((finite * pick).sum(), a)
    rows = (grad.abs().sum(-1) > 0).sum()  # rows of the left operand that this query's scores read
    if int(rows) <= 1 or a.shape[-2] == 1:
        return left, right, True
    return right, left, False


def _parts(graph: Graph, operand: int, stops: set[int], by_out: dict[int, Linear]) -> list[Part]:
    """The columns of linear results that an operand depends on."""
    sources = [n for n in ([operand] if operand in stops else graph.sources(operand, stops)) if n in by_out]
    if not sources:
        return []
    leaves = {n: (graph.values[n].detach() + 0.0).requires_grad_() for n in sources}
    value = graph.evaluate(operand, leaves)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(value.shape, generator=generator, dtype=value.dtype)
    grads = derivatives((value * weight).sum(), list(leaves.values()))
    parts: list[Part] = []
    for number, grad in zip(sources, grads, strict=True):
        linear = by_out[number]
        if grad is not None:
            used = grad.nan_to_num().reshape(-1, linear.weight.shape[0]).abs().sum(0)
            columns = (used > 0).nonzero()[:, 0]
            if len(columns):
                parts.append(Part(linear, columns))
    return parts
