"""Which parts of two models correspond: by the dataflow, and by the weights, never by names."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch
from torch import Tensor

from isoform.verify.diagnose.graph import Graph
from isoform.verify.diagnose.parts import Inner, Linear, Part, Site
from isoform.verify.diagnose.rerun import VIEWS
from isoform.verify.diagnose.structure import Structure
from isoform.verify.record import Recording

Key = tuple[Hashable, ...]


class Model:
    """One recorded model with its parts, each under a key that does not depend on how it is written."""

    def __init__(
        self,
        recording: Recording,
        rounding: torch.dtype | None = None,
        *,
        native: bool = False,
        parameters: Mapping[str, Tensor] | None = None,
        placed: bool = False,
    ) -> None:
        self.recording = recording
        self.graph = Graph(recording, rounding, native=native, parameters=parameters, placed=placed)
        self._given = (rounding, native, parameters)
        self.structure = Structure(self.graph)
        self._roles: dict[int, str] = {}
        self.rename({})

    def placed(self) -> Model:
        """The same, where first vectors of more positions than the input begin with their positions added."""
        rounding, native, parameters = self._given
        return Model(self.recording, rounding, native=native, parameters=parameters, placed=True)

    def rename(self, given: Mapping[int, Key]) -> None:
        """Give keys to what is added to the stream, by the numbers of the parts.

        Args:
            given: keys of linear results that are fixed beforehand.
        """
        self.sources = self._sources() | dict(given)
        self.aliases: dict[int, Key] = {}
        self._number()

    def alias(self, node: int, key: Key) -> None:
        """Give a sum of the stream, or a map's result that stands for one, the key of another model's sum."""
        self.aliases[node] = key
        if node not in self.structure.states:
            self.structure.adopt(node)
        self._number()

    def _number(self) -> None:
        self._keys: dict[int, Key] = {}
        self.states = {self.state_key(n): n for n in [*self.structure.entries, *self.structure.states]}
        self.reads = self._reads()

    @property
    def name(self) -> str:
        """The class of the model."""
        return self.recording.subject

    def role(self, node: int) -> str:
        """The stream that a node belongs to: "target" or "source"."""
        if node not in self._roles:
            self._roles[node] = self._find_role(node)
        return self._roles[node]

    def _find_role(self, node: int) -> str:
        structure = self.structure
        seen: set[int] = set()
        stack = [node]
        while stack:
            n = stack.pop()
            if n in seen:
                continue
            seen.add(n)
            if n in structure.entries:
                return self._entry_role(n)
            linear = structure.by_out.get(n)
            site = next((s for s in structure.sites if s.mix == n), None)
            if linear is not None:
                stack.append(linear.read)
            elif site is not None:
                stack.append(site.query)
            else:
                above = self.graph.sources(n, structure.cut - {n})
                # The stream itself before what was added to it, queries before keys.
                stream = {*structure.states, *structure.entries}
                queries = {p.linear.out for s in structure.sites for p in s.q}
                stack += sorted(above, key=lambda a: (a in stream, a in queries))
        return "target"

    def _entry_role(self, node: int) -> str:
        contents = {name: role for role, name in self.recording.contents.items()}
        stack, seen = [node], set[int]()
        while stack:
            n = stack.pop()
            seen.add(n)
            for ref in self.graph.nodes[n].refs():
                if ref.kind == "input" and ref.name in contents:
                    return contents[str(ref.name)]
                if ref.kind == "node" and int(ref.name) not in seen:
                    stack.append(int(ref.name))
        return "target"

    def sources_at(self, key: Key | None) -> int | None:
        """The node of a contribution to the stream."""
        return next((node for node, other in self.sources.items() if other == key), None)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """By name, as recorded or as they were replaced."""
        return {**self.recording.parameters, **(self._given[2] or {})}

    def real(self, role: str) -> Tensor:
        """``[B, T]`` True = a real token."""
        return self.graph.real.get(role, next(iter(self.graph.real.values())))

    def of_linear(self, linear: Linear) -> Tensor | None:
        """A linear map's result as ``[B, T, out]``."""
        width = linear.weight.shape[0]
        return self.graph.canonical(self.graph.values[linear.out], width, linear.out)

    def of_node(self, node: int, width: int | None = None) -> Tensor | None:
        """A node's value as ``[B, T, features]``."""
        return self.graph.canonical(self.graph.values[node], width or self.width(node), node)

    def width(self, node: int) -> int:
        """Features of a node's value: its last axis, or 1 where an axis of one was dropped (``[B, T]``)."""
        value, above = self.graph.values[node], node
        while self.graph.nodes[above].op in VIEWS and self.graph.args(above):
            above = self.graph.args(above)[0]
            wider = self.graph.values[above]
            if wider.shape == (*value.shape, 1) and self.graph.canonical(value, 1) is not None:
                return 1
        return value.shape[-1]

    def state_key(self, node: int) -> Key:
        """All that was added up to a state."""
        if node not in self._keys:
            self._keys[node] = self.aliases[node] if node in self.aliases else self._added_up(node)
        return self._keys[node]

    def top_key(self, top: int) -> Key:
        """The key of what a part reads or adds: a sum's, or that of the map it comes out of."""
        if top in self.sources and top not in self.aliases and top not in self.structure.entries:
            return self.sources[top]
        return self.state_key(top)

    def _added_up(self, node: int) -> Key:
        found: set[Key] = set()
        seen: set[int] = set()
        stack = [node]
        while stack:
            n = stack.pop()
            if n in seen:
                continue
            seen.add(n)
            if n in self.aliases:
                found |= self.aliases[n][1]  # type: ignore[arg-type]
            elif n in self.sources:
                found.add(self.sources[n])
            else:
                stack += [t for a in self.graph.live_args(n) for t in self.structure.tops(a)]
        return ("state", frozenset(found))

    def _sources(self) -> dict[int, Key]:
        structure = self.structure
        keys: dict[int, Key] = {}
        counts: dict[str, int] = {}
        for entry in structure.entries:
            role = self._entry_role(entry)
            keys[entry] = ("entry", role, counts.get(role, 0))
            counts[role] = counts.get(role, 0) + 1
        for site in structure.sites:
            keys[site.mix] = ("mix", site.index)
            if site.out is not None:
                keys[site.out.out] = ("site", site.index)
        for inner in structure.inners:
            keys.setdefault(inner.out.out, ("inner", inner.index))
        for number, router in enumerate(structure.routers):
            keys.setdefault(router.linear.out, ("router", number))
        # How many maps make queries, keys and values is a matter of style.
        parts = {p.linear.out for site in structure.sites for _, p in site.parts()}
        parts |= {linear.out for inner in structure.inners for linear in inner.sources}
        for kind, chosen in (("linear", False), ("part", True)):
            left = (n for n in structure.linears if n.out not in keys and (n.out in parts) == chosen)
            for number, linear in enumerate(left):
                keys[linear.out] = (kind, number)
        return keys

    def _reads(self) -> dict[Key, int]:
        """Who reads the stream."""
        found: dict[Key, int] = {}
        taken: set[int] = set()
        for site in self.structure.sites:
            for name, part in site.parts():
                found.setdefault(("site", site.index, name), part.linear.read)
                taken.add(part.linear.node)
        for inner in self.structure.inners:
            for linear in inner.sources:
                if f"linear {linear.node}" in self.structure.reads:
                    found.setdefault(("inner", inner.index), linear.read)
                    taken.add(linear.node)
        others = [r for r in self.structure.reads.items() if r[1][1] is None or r[1][1].node not in taken]
        for number, (_, (node, _linear)) in enumerate(others):
            found[("other", number)] = node
        return found


def values_of(model: Model, parts: list[Part]) -> Tensor | None:
    """The results of some parts side by side, ``[B, T, columns]``."""
    found: list[Tensor] = []
    for part in parts:
        value = model.of_linear(part.linear)
        if value is None:
            return None
        found.append(value[..., part.columns])
    return torch.cat(found, -1)


def filled(model: Model, parts: list[Part], value: Tensor, given: dict[int, Tensor]) -> None:
    """Put values for some parts into ``given``, to run the model again with them.

    Args:
        model: whose parts they are.
        parts: the columns.
        value: ``[B, T, columns]`` in the order of the parts.
        given: node → value; columns of a linear map that are not among the parts keep theirs.
    """
    at = 0
    for part in parts:
        linear, width = part.linear, len(part.columns)
        size = linear.weight.shape[0]
        old = given.get(linear.out, model.graph.values[linear.out])
        whole_value = model.graph.canonical(old, size, linear.out)
        assert whole_value is not None
        new = whole_value.clone()
        new[..., part.columns] = value[..., at : at + width]
        given[linear.out] = model.graph.shaped(new, linear.out, size)
        at += width


__all__ = ["Inner", "Key", "Linear", "Model", "Part", "Site", "filled", "values_of"]
