"""A recording as a graph that can be run again in float64, with other values put in anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isoform.errors import DataError
from isoform.verify.diagnose.lengths import OUTER, begin, inner_lengths
from isoform.verify.diagnose.liveness import classify
from isoform.verify.diagnose.rerun import run_again, wide
from isoform.verify.record import Node, Recording, Ref


class Graph:
    """What one model computes.

    Attributes:
        recording: the pass.
        nodes: its operations.
        values: every node's value in float64.
        live: whether a node depends on what the tokens are, not only on where they stand.
        static: whether it depends on parameters and constants alone.
        batch: rows of the batch.
        lengths: positions by role.
        native: values are those of the pass itself, in its own precision.
        rounding: a dtype that parameters are rounded to first, as the other model's are.
        real: ``[B, T]`` by role; where attentions have other lengths than the inputs, both.
    """

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
        self.native = native
        self.rounding = rounding
        self.nodes = recording.nodes
        self.real = {role: recording.inputs[name].bool() for role, name in recording.reals.items()}
        self.batch = next(iter(self.real.values())).shape[0]
        self.lengths = {role: real.shape[1] for role, real in self.real.items()}
        if recording.output.kind != "node":
            raise DataError(
                f"{recording.subject}: the result does not come out of an operation on the inputs"
            )
        self.output = int(recording.output.name)
        self._args = [[int(r.name) for r in node.refs() if r.kind == "node"] for node in self.nodes]
        self.useful = self.ancestors([self.output])
        self.values: list[Tensor] = []
        self._constants: dict[Ref, Tensor] = {
            Ref("parameter", name): value for name, value in (parameters or {}).items()
        }
        if native:
            self.values = [node.value for node in self.nodes]
        for node in () if native else self.nodes:
            useful = node.number in self.useful
            self.values.append(self._run(node, {}) if useful else node.value)
        self.real, self.lengths = inner_lengths(self.nodes, self.values, self.useful, self.real)
        self.live, self.static, self.entries = classify(recording, self.useful)
        self._live_args = [[n for n in args if self.live[n]] for args in self._args]
        for role in [r for r in self.lengths if OUTER + r in self.lengths]:
            first = begin(self.values, self.live, self.useful, (self.batch, self.lengths[role]))
            if first is not None:
                first = self._placed(first) if placed else first
                above = self.ancestors([first])
                self.entries = sorted([first, *(e for e in self.entries if e not in above)])
        self.users: dict[int, list[int]] = {n: [] for n in self.useful}
        for number in sorted(self.useful):
            for arg in self.args(number):
                if number not in self.users[arg]:
                    self.users[arg].append(number)

    def _placed(self, first: int) -> int:
        """On to where positions have been added to the first vectors, if that is all that reads them."""
        users = [n for n in self.useful if first in self.args(n) and self.live[n]]
        if len(users) != 1 or self.nodes[users[0]].op != "add" or len(self.live_args(users[0])) != 1:
            return first
        return users[0]

    def args(self, number: int) -> list[int]:
        """The nodes that a node reads."""
        return self._args[number]

    def live_args(self, number: int) -> list[int]:
        """Those of them that carry content."""
        return self._live_args[number]

    def value(self, ref: Any) -> Tensor:
        """A reference's value in float64."""
        if ref.kind == "node":
            return self.values[int(ref.name)]
        if ref not in self._constants:
            value = self.recording.value(ref)
            if self.rounding is not None and ref.kind == "parameter" and value.is_floating_point():
                value = value.to(self.rounding)
            self._constants[ref] = value if self.native else wide(value)
        return self._constants[ref]

    def evaluate(
        self,
        target: int,
        given: Mapping[int, Tensor],
        parameters: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """The value of a node when others have the given values; differentiable."""
        return self.evaluate_all([target], given, parameters)[target]

    def evaluate_all(
        self,
        targets: Iterable[int],
        given: Mapping[int, Tensor],
        parameters: Mapping[str, Tensor] | None = None,
    ) -> dict[int, Tensor]:
        """Likewise for several nodes."""
        return dict(self.evaluated(targets, given, parameters))

    def evaluated(
        self,
        targets: Iterable[int],
        given: Mapping[int, Tensor],
        parameters: Mapping[str, Tensor] | None = None,
    ) -> Iterator[tuple[int, Tensor]]:
        """Likewise one after another, in the order of the pass; what nothing further reads is let go."""
        wanted, touched = set(targets), parameters or {}
        needed = sorted(self.ancestors(list(wanted), set(given)))
        last = {arg: number for number in needed for arg in (number, *self._args[number])}
        gone: dict[int, list[int]] = {}
        for arg, number in last.items():
            gone.setdefault(number, []).append(arg)
        changed, done = set(given), dict(given)
        for number in needed:
            node = self.nodes[number]
            moved = any(n in changed for n in self._args[number])
            moved = moved or any(r.kind == "parameter" and r.name in touched for r in node.refs())
            if number not in given and moved:
                done[number] = self._run(node, done, touched)
                changed.add(number)
            if number in wanted:
                yield number, done.get(number, self.values[number])
            for arg in gone.get(number, ()):
                done.pop(arg, None)

    def reading(self, inputs: Mapping[str, Tensor]) -> dict[int, Tensor]:
        """Values of the nodes that read these inputs, if these were the inputs."""

        def value(ref: Ref) -> Tensor:
            given = inputs.get(str(ref.name)) if ref.kind == "input" else None
            return self.value(ref) if given is None else given

        nodes = (self.nodes[n] for n in self.useful)
        readers = [n for n in nodes if any(r.kind == "input" and r.name in inputs for r in n.refs())]
        return {node.number: run_again(node, value, native=self.native) for node in readers}

    def region(self, target: int, stops: Iterable[int]) -> list[int]:
        """Nodes between ``stops`` (not included) and a target (included), in order; content only."""
        stops = set(stops)
        seen: set[int] = set()
        stack = [target]
        while stack:
            number = stack.pop()
            if number in seen or (number in stops and number != target):
                continue
            seen.add(number)
            stack += self.live_args(number)
        return sorted(seen)

    def sources(self, target: int, stops: Iterable[int]) -> list[int]:
        """The nearest of ``stops`` that a target's content comes from."""
        stops = set(stops)
        found: set[int] = set()
        seen: set[int] = set()
        stack = list(self.live_args(target))
        while stack:
            number = stack.pop()
            if number in seen:
                continue
            seen.add(number)
            if number in stops:
                found.add(number)
            else:
                stack += self.live_args(number)
        return sorted(found)

    def parameters(self, region: Iterable[int]) -> list[str]:
        """Parameters and buffers that a region reads, directly or through operations on parameters alone."""
        found: dict[str, None] = {}
        seen: set[int] = set()
        stack = list(region)
        inside = set(stack)
        while stack:
            number = stack.pop()
            for ref in self.nodes[number].refs():
                if ref.kind == "parameter":
                    found[str(ref.name)] = None
                elif (
                    ref.kind == "node" and not self.live[int(ref.name)] and int(ref.name) not in seen | inside
                ):
                    seen.add(int(ref.name))
                    stack.append(int(ref.name))
        return sorted(found)

    def canonical(self, value: Tensor, features: int, node: int | None = None) -> Tensor | None:
        """A value as ``[B, T, features]``, whatever the order of its leading axes; None: it has none."""
        if features == 0 or value.numel() % features:
            return None
        rows = value.numel() // features
        lead: list[int] = []
        for size in value.shape:
            if _product(lead) == rows and size != 1:
                break
            lead.append(size)
        lead = [size for size in lead if size != 1 or self.batch == 1 or 1 in self.lengths.values()]
        for length in self.lengths.values():
            if rows == self.batch * length:
                flat = len(lead) <= 1
                first = self.order(node) if flat and node is not None else None
                swapped = (
                    first == "time" if flat else lead[:2] == [length, self.batch] != [self.batch, length]
                )
                if swapped:
                    return value.reshape(length, self.batch, features).transpose(0, 1)
                return value.reshape(self.batch, length, features)
        for role, real in self.real.items():
            length = self.lengths[role]
            if rows == int(real.sum()):  # only real tokens, those of all rows behind each other
                out = value.new_zeros(self.batch, length, features)
                out[real] = value.reshape(rows, features)
                return out
        if rows == self.batch:
            return value.reshape(self.batch, 1, features)
        return None

    def shaped(self, value: Tensor, node: int, features: int) -> Tensor:
        """``[B, T, features]`` in the form that a node's value has: the inverse of `canonical`."""
        old = self.values[node]
        numbers = torch.arange(old.numel(), dtype=torch.float64).reshape(old.shape)
        places = self.canonical(numbers, features, node)
        assert places is not None
        rows = old.numel() // features
        if rows not in {self.batch * length for length in self.lengths.values()} and rows != self.batch:
            role = next(r for r, real in self.real.items() if int(real.sum()) == rows)
            return value[self.real[role]].reshape(old.shape)
        out = value.new_empty(old.numel())
        out[places.long().reshape(-1)] = value.reshape(-1)
        return out.reshape(old.shape)

    def order(self, node: int) -> str:
        """Which axis comes first where rows are flattened: "batch" or "time"."""
        seen = {node}
        queue = [node]
        while queue:
            number = queue.pop(0)
            shape = list(self.values[number].shape)
            if len(shape) >= 3:
                for length in self.lengths.values():
                    if shape[:2] == [self.batch, length]:
                        return "batch"
                    if shape[:2] == [length, self.batch]:
                        return "time"
            if len(seen) > 40:
                break
            near = self.args(number) + self.users.get(number, [])
            fresh = [n for n in near if n not in seen and (self.live[n])]
            seen |= set(fresh)
            queue += fresh
        return "batch"

    def place(self, number: int) -> tuple[str, str]:
        """Module path and source line of a node."""
        return self.nodes[number].module, self.nodes[number].source

    def _run(
        self, node: Node, done: Mapping[int, Tensor], parameters: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        def value(ref: Ref) -> Tensor:
            if ref.kind == "node" and int(ref.name) in done:
                return done[int(ref.name)]
            if parameters and ref.kind == "parameter" and ref.name in parameters:
                return parameters[str(ref.name)]
            return self.value(ref)

        return run_again(node, value, native=self.native)

    def ancestors(self, targets: Sequence[int], stops: set[int] | None = None) -> set[int]:
        """Nodes that targets are made of, themselves included; nothing behind ``stops``."""
        seen: set[int] = set()
        stack = list(targets)
        while stack:
            number = stack.pop()
            if number in seen:
                continue
            seen.add(number)
            if stops is None or number not in stops:
                stack += self.args(number)
        return seen


def _product(sizes: Sequence[int]) -> int:
    out = 1
    for size in sizes:
        out *= size
    return out
