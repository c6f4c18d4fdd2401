"""The parts of a Transformer, found in the dataflow of any model: linear maps, attention, the stream.

Nothing here knows a module's name or class. A linear map is a product with a matrix that comes from
parameters alone; attention is a softmax over a product of two activations; the stream is where sublayers'
outputs are added to what was there before.
"""

from __future__ import annotations

from isoform.verify.diagnose.graph import Graph
from isoform.verify.diagnose.linears import find_linears
from isoform.verify.diagnose.parts import Inner, Linear
from isoform.verify.diagnose.rerun import VIEWS
from isoform.verify.diagnose.routers import EXPERTS, expert_networks, find_routers
from isoform.verify.diagnose.sites import find_sites, parts_of
from isoform.verify.diagnose.stacks import stacked_networks

ROOT = -1


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
        readers: for each of these the nodes that read it.
        top: for each node the entry, state or linear result it is a function of alone; ROOT: of several.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.linears = find_linears(graph)
        self.routers = find_routers(graph, self.linears)
        self.experts = expert_networks(graph, self.routers)
        self.experts += stacked_networks(graph, self.routers, EXPERTS + len(self.experts))
        experts = {linear.node for router in self.routers for linear in router.experts}
        self.linears = [linear for linear in self.linears if linear.node not in experts]
        self.by_out = {linear.out: linear for linear in self.linears}
        self.entries = [e for e in graph.entries if e not in {n.node for n in self.linears}]
        self.stops = {*self.by_out, *self.entries}
        self.sites = find_sites(graph, self.linears, self.stops)
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
        self._find_mapped()
        outs = {site.out for site in self.sites}
        for linear in self.linears:
            if linear in outs:
                continue
            tops = self.tops(linear.read)
            if tops and all(t in self.by_out and t not in self.states for t in tops):
                self.inners.append(self._inner(linear, [self.by_out[t] for t in tops]))
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

    def adopt(self, node: int) -> None:
        """Take a map's result, to which nothing is added, for a sum of the stream."""
        self.states = sorted([*self.states, node])
        self.trunk = self._trunks()

    def _inner(self, linear: Linear, sources: list[Linear]) -> Inner:
        """What reads maps; where one of them makes queries, keys or values too, some of their columns."""
        shared = {part.linear for site in self.sites for _, part in site.parts()}
        parts = parts_of(self.graph, linear.read, self.cut, self.by_out) if shared & {*sources} else []
        return Inner(len(self.inners), linear, sources, parts=parts)

    def demote(self, inner: Inner) -> None:
        """Take a map that reads other maps for one that reads the stream."""
        self.inners.remove(inner)
        self.reads[f"linear {inner.out.node}"] = (inner.out.read, inner.out)
        inner.out.role = ""

    @property
    def sums(self) -> list[int]:
        """States in which something is added up."""
        return [n for n in self.states if n not in self.by_out]

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
        # Results of experts that are added up one after the other are no stream.
        mixed = {n for r in self.routers for n in graph.ancestors([r.end]) - graph.ancestors([r.choice])}
        candidates = [
            n
            for n, above in self.idom.items()
            if above == ROOT
            and n not in self.stops
            and n not in mixed
            and graph.nodes[n].op in ("add", "sub", "addcmul", "lerp")
            and len(graph.live_args(n)) >= 2
        ]
        self.cut = {*self.stops, *mixes, *candidates}
        for number in [n for n in candidates if self._within(n, candidates)]:
            candidates.remove(number)
            self.cut.discard(number)
        # A sum whose only reader adds something further is a step of that sum.
        for number in candidates:
            users = self._beyond_views(number)
            if len(users) == 1 and users[0] in candidates:
                self.cut.discard(number)
                continue
            last = self._with_vector(number)
            if last != number:
                self.cut.discard(number)
                self.cut.add(last)
            self.states.append(last)

    def _within(self, number: int, candidates: list[int]) -> bool:
        """Whether only maps that read the stream behind something else are added: gate and content, say."""
        terms = {top for arg in self.graph.live_args(number) for top in self.tops(arg)}
        if not all(t in self.by_out for t in terms) or len(terms) < 2:
            return False
        reads = [self.by_out[t].read for t in terms]
        beyond = {t for r in reads if r not in self.cut for t in self.tops(r)}
        return all(r not in self.cut for r in reads) and beyond <= {*candidates, *self.entries}

    def _find_mapped(self) -> None:
        """Maps' results that other maps read and that go into a sum: where narrow embeddings are widened."""
        read = {tops[0] for tops in map(self.tops, (n.read for n in self.linears)) if len(tops) == 1}
        added = {t for s in self.states for arg in self.graph.live_args(s) for t in self.tops(arg)}
        self.states = sorted([*self.states, *(n for n in self.by_out if n in read and n in added)])

    def _with_vector(self, number: int) -> int:
        """On to where a vector of parameters has been added to a sum: the sum without it is read nowhere."""
        graph = self.graph
        users = self._beyond_views(number)
        if len(users) != 1 or graph.nodes[users[0]].op not in ("add", "sub"):
            return number
        others = [r for r in graph.nodes[users[0]].refs() if r.kind != "node" or not graph.live[int(r.name)]]
        vectors = [r for r in others if graph.value(r).numel() == graph.values[number].shape[-1]]
        if len(others) != 1 or len(vectors) != 1 or len(graph.live_args(users[0])) != 1:
            return number
        return self._with_vector(users[0])

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
        ends = [read for read, _ in self.reads.values()] + self.sums
        for end in ends:
            starts = self._terms(end) if end in self.states and end not in self.by_out else [end]
            for start in starts:
                for top in self.tops(start):
                    if top in (*self.states, *self.entries):
                        readers.setdefault(top, []).append(start)
        self.readers = readers
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
