"""How a family names and lays out its tensors, as data (R39–R40).

A mapping is a list of entries. Against a network they become rules, each between some of our tensors and some
of theirs; together they cover every tensor on either side exactly once.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from isoform import config
from isoform.checkpoints import operations as op
from isoform.checkpoints.weights import listed, stored_names
from isoform.errors import ArtifactError
from isoform.nn import Attention, Transformer
from isoform.nn.experts import Experts as ExpertsModule
from isoform.nn.linear import Packed as PackedModule

M = TypeVar("M", bound=nn.Module)


@dataclasses.dataclass(frozen=True)
class Rule:
    """Tensors of ours made of tensors of theirs by reversible steps."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    steps: tuple[op.Operation, ...] = ()

    def load(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Theirs to ours."""
        result = list(tensors)
        for step in self.steps:
            result = step.load(result)
        return [t.contiguous() for t in result]

    def save(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Ours to theirs."""
        result = list(tensors)
        for step in reversed(self.steps):
            result = step.save(result)
        return [t.contiguous() for t in result]


class Target:
    """A network to be filled or read: what it has, by name."""

    def __init__(self, model: Transformer) -> None:
        self.config = model.config
        self.names = stored_names(model)
        self._modules = dict(model.named_modules(remove_duplicate=False))

    def module(self, name: str, kind: type[M]) -> M | None:
        """The module of that name and kind, if there is one."""
        module = self._modules.get(name)
        return module if isinstance(module, kind) else None


class Entry(Protocol):
    """A line of a mapping: makes the rules for those parameters that the network has."""

    def rules(self, target: Target, ours: str, theirs: str) -> Iterable[Rule]:
        """Rules, under a prefix on each side."""
        ...


@dataclasses.dataclass(frozen=True)
class Same:
    """One parameter under two names."""

    ours: str
    theirs: str
    steps: tuple[op.Operation, ...] = ()

    def rules(self, target: Target, ours: str, theirs: str) -> Iterator[Rule]:
        if ours + self.ours in target.names:
            yield Rule((ours + self.ours,), (theirs + self.theirs,), self.steps)


@dataclasses.dataclass(frozen=True)
class Module:
    """The ``weight`` of a module and, where there is one, its ``bias``."""

    ours: str
    theirs: str
    transposed: bool = False
    """Whether theirs is [in, out]."""

    def rules(self, target: Target, ours: str, theirs: str) -> Iterator[Rule]:
        for suffix in (".weight", ".bias"):
            steps = (op.Transpose(),) if self.transposed and suffix == ".weight" else ()
            yield from Same(self.ours + suffix, self.theirs + suffix, steps).rules(target, ours, theirs)


@dataclasses.dataclass(frozen=True)
class Packed:
    """Separate projections there, one packed parameter here; ``parts`` names theirs by ours."""

    ours: str
    parts: tuple[tuple[str, str], ...]

    def rules(self, target: Target, ours: str, theirs: str) -> Iterator[Rule]:
        module = target.module(ours + self.ours, PackedModule)
        if module is None:
            return
        names = dict(self.parts)
        sizes = tuple(module.parts.values())
        sources = tuple(f"{theirs}{names[part]}.weight" for part in module.parts)
        yield Rule((f"{ours}{self.ours}.weight",), sources, (op.Concatenate(sizes),))
        if module.bias is not None:
            sizes = tuple(module.parts[part] for part in module.biased)
            sources = tuple(f"{theirs}{names[part]}.bias" for part in module.biased)
            yield Rule((f"{ours}{self.ours}.bias",), sources, (op.Concatenate(sizes),))


@dataclasses.dataclass(frozen=True)
class CrossPacked:
    """A cross-attention whose three projections are one tensor there, the query apart here."""

    ours: str
    theirs: str
    """With ``{}`` for ``weight`` or ``bias``."""

    def rules(self, target: Target, ours: str, theirs: str) -> Iterator[Rule]:
        module = target.module(ours + self.ours, Attention)
        if module is None:
            return
        for kind in ("weight", "bias"):
            names = tuple(f"{ours}{self.ours}.{part}.{kind}" for part in ("query", "key_value"))
            if names[0] in target.names:
                sizes = tuple(target.names[name][0] for name in names)
                yield Rule(names, (theirs + self.theirs.format(kind),), (op.Divide(sizes),))


@dataclasses.dataclass(frozen=True)
class Fused:
    """One fused query/key/value projection on both sides, its rows in another order there."""

    ours: str
    theirs: str
    order: Callable[[config.Attention], tuple[int, ...]]
    transposed: bool = False

    def rules(self, target: Target, ours: str, theirs: str) -> Iterator[Rule]:
        module = target.module(ours + self.ours, Attention)
        if module is None:
            return
        order = self.order(module.cfg)
        rows: tuple[op.Operation, ...] = () if order == tuple(range(len(order))) else (op.Rows(order),)
        weight: tuple[op.Operation, ...] = (op.Transpose(), *rows) if self.transposed else rows
        yield Rule((f"{ours}{self.ours}.qkv.weight",), (f"{theirs}{self.theirs}.weight",), weight)
        if module.qkv.bias is not None:
            yield Rule((f"{ours}{self.ours}.qkv.bias",), (f"{theirs}{self.theirs}.bias",), rows)


@dataclasses.dataclass(frozen=True)
class ExpertGroup:
    """A router and its experts; ``{}`` stands for the expert's number."""

    ours: str
    router: str
    up: tuple[str, ...]
    down: str

    def rules(self, target: Target, ours: str, theirs: str) -> Iterator[Rule]:
        module = target.module(ours + self.ours, ExpertsModule)
        if module is None:
            return
        yield from Module(f"{self.ours}.router.scores", self.router).rules(target, ours, theirs)
        n, width = module.cfg.n_experts, module.cfg.expert.width
        up = tuple(f"{theirs}{name.format(i)}.weight" for i in range(n) for name in self.up)
        down = tuple(f"{theirs}{self.down.format(i)}.weight" for i in range(n))
        yield Rule((f"{ours}{self.ours}.up",), up, (op.Experts((width,) * len(self.up)),))
        yield Rule((f"{ours}{self.ours}.down",), down, (op.Experts((module.down.shape[1],)),))


@dataclasses.dataclass(frozen=True)
class Layers:
    """Entries for every layer that has parameters of its own; ``{}`` stands for its number.

    Args:
        stack: "encoder" or "decoder".
        theirs: the prefix of a layer there.
        entries: relative to the layer on both sides.
        number: their number of our layer; the same when omitted.
    """

    stack: str
    theirs: str
    entries: tuple[Entry, ...]
    number: Callable[[int], int | str] = int

    def rules(self, target: Target, ours: str, theirs: str) -> Iterator[Rule]:
        cfg = target.config.encoder if self.stack == "encoder" else target.config.decoder
        if cfg is None:
            return
        for i in sorted({cfg.owner(i) for i in range(cfg.n_layers)}):
            for entry in self.entries:
                yield from entry.rules(
                    target, f"{ours}{self.stack}.layers.{i}.", theirs + self.theirs.format(self.number(i))
                )


@dataclasses.dataclass(frozen=True)
class Tied:
    """A second name of a tensor there. It may be in the file or not; if it is, it must be equal."""

    theirs: str
    of: str
    written: bool = False
    """Whether the library misses it when it is not in the file."""
    why: str = "the configuration ties them"
    """Why copies that differ are refused."""


@dataclasses.dataclass(frozen=True)
class Ignored:
    """A tensor there that the network does not need, and why.

    ``check`` returns what is wrong with its content, or None; it is run where there is one.
    """

    pattern: str
    why: str
    check: Callable[[Tensor], str | None] | None = None


@dataclasses.dataclass(frozen=True)
class Computed:
    """A tensor there that follows from the configuration, e.g. a table of sinusoids.

    In a file it must have the computed content; it is written because the library misses it otherwise.
    """

    theirs: str
    make: Callable[[Mapping[str, Any]], Tensor]
    """From the keys of ``config.json``."""


@dataclasses.dataclass(frozen=True)
class FamilyMapping:
    """The tensors of one family for one configuration.

    Args:
        entries: what corresponds to what.
        ties: second names there.
        ignored: buffers, and parts of other heads.
        computed: tensors there that follow from the configuration; only written.
        base: the prefix of the bare model's tensors in a model with a head; files of the bare model lack it.
        heads: prefixes of tensors that never have it.
    """

    entries: tuple[Entry, ...]
    ties: tuple[Tied, ...] = ()
    ignored: tuple[Ignored, ...] = ()
    computed: tuple[Computed, ...] = ()
    base: str = ""
    heads: tuple[str, ...] = ()

    def rules(self, model: Transformer) -> list[Rule]:
        """All rules for a network, checked to cover each of its parameters once."""
        target = Target(model)
        rules = [rule for entry in self.entries for rule in entry.rules(target, "", "")]
        covered = Counter(name for rule in rules for name in rule.ours)
        twice = {name for name, count in covered.items() if count > 1}
        if twice or set(covered) != set(target.names):
            odd = sorted(twice | (set(covered) ^ set(target.names)))
            raise ArtifactError(f"the mapping does not cover, or covers twice: {listed(odd)}")
        return rules
