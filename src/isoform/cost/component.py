"""A tree of named components, each with its closed form and its value."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from isoform.config import Norm
from isoform.cost.formula import Formula, total

Sizes = Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Component:
    """A named part of the network and how many parameters it has.

    Attributes:
        name: what it is called within its parent.
        formula: the closed form of one occurrence; None where parts of different sizes are added up.
        sizes: the value of every symbol of the formula.
        repeat: how many occurrences with parameters of their own there are.
        active: how many of the occurrences one token passes through (experts: the top k).
        lookup: whether it is read by index instead of multiplied (tables, positions, token types).
        shared_with: the component whose parameters it uses; it then counts nothing itself.
        parts: what it consists of; empty for a single tensor.
    """

    name: str
    formula: Formula | None = None
    sizes: Sizes = dataclasses.field(default_factory=dict[str, int])
    repeat: int = 1
    active: int = 1
    lookup: bool = False
    shared_with: str | None = None
    parts: tuple[Component, ...] = ()

    @property
    def each(self) -> int:
        """Parameters of one occurrence."""
        if self.shared_with is not None:
            return 0
        if self.parts:
            return sum(part.total for part in self.parts)
        return self.formula.value(self.sizes) if self.formula is not None else 0

    @property
    def total(self) -> int:
        """Parameters of all occurrences; what is shared counts nothing."""
        return self.repeat * self.each

    @property
    def total_active(self) -> int:
        """Parameters that take part in computing one token."""
        if self.parts:
            return self.active * sum(part.total_active for part in self.parts)
        return self.active * self.each

    @property
    def total_lookup(self) -> int:
        """Parameters that are only ever read by index."""
        if self.parts:
            return self.repeat * sum(part.total_lookup for part in self.parts)
        return self.total if self.lookup else 0

    def walk(self, prefix: str = "") -> Iterator[tuple[str, Component]]:
        """Every component below this one with its dotted path, parents first."""
        for part in self.parts:
            path = f"{prefix}{part.name}"
            yield path, part
            yield from part.walk(f"{path}.")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with stable keys."""
        return {
            "name": self.name,
            "formula": None if self.formula is None else str(self.formula),
            "sizes": dict(self.sizes),
            "repeat": self.repeat,
            "each": self.each,
            "total": self.total,
            "active": self.total_active,
            "shared_with": self.shared_with,
            "parts": [part.to_dict() for part in self.parts],
        }


def leaf(
    name: str,
    formula: Formula,
    sizes: Sizes,
    *,
    lookup: bool = False,
    shared_with: str | None = None,
) -> Component:
    """A single tensor."""
    used = {key: sizes[key] for key in sizes if key in formula.symbols()}
    return Component(name, formula, used, lookup=lookup, shared_with=shared_with)


def gather(parts: list[Component], name: str = "", *, repeat: int = 1) -> Component:
    """A parent whose formula is the sum of its parts', where one set of symbols can say it."""
    sizes: dict[str, int] = {}
    for part in parts:
        if part.formula is None or any(sizes.get(k, v) != v for k, v in part.sizes.items()):
            return Component(name, parts=tuple(parts), repeat=repeat, active=repeat)
        sizes |= part.sizes
    own = [part for part in parts if part.shared_with is None]
    formula = total(part.repeat * part.formula for part in own if part.formula is not None)
    return Component(name, formula, sizes, parts=tuple(parts), repeat=repeat, active=repeat)


def linear(name: str, inputs: Formula, outputs: Formula, bias: bool, sizes: Sizes) -> Component:
    """A matrix and its bias."""
    parts = [leaf("weight", inputs * outputs, sizes)]
    if bias:
        parts.append(leaf("bias", outputs, sizes))
    return gather(parts, name)


def norm(name: str, kind: Norm, width: Formula, sizes: Sizes) -> Component:
    """Gain and bias, where there are any (R12, R13)."""
    return leaf(name, width * (int(kind.gain) + int(kind.bias)), sizes)
