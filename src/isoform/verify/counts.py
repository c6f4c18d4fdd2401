"""Parameters in closed form, held against the real modules component by component (R26)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from isoform.config import Layer, ModelConfig
from isoform.cost.component import Component
from isoform.cost.groups import layer_groups
from isoform.cost.parameters import parameters
from isoform.nn import Transformer


@dataclasses.dataclass(frozen=True)
class Count:
    """One component.

    Args:
        path: ``embedding``, ``decoder``, ``decoder.layers.0-5``, ``decoder.layers.0-5.attention`` …
        formula: closed form of one occurrence; None where parts of different sizes are added up.
        sizes: the value of every symbol in it.
        repeat: how many occurrences with parameters of their own there are, over all layers of the group.
        each: parameters of one occurrence by the closed form.
        total: of all of them.
        counted: what the modules have; None inside a component that is one module.
        shared_with: the component whose parameters it uses; it then has none itself.
    """

    path: str
    formula: str | None
    sizes: dict[str, int]
    repeat: int
    each: int
    total: int
    counted: int | None
    shared_with: str | None

    @property
    def depth(self) -> int:
        """How deep in the tree it stands."""
        return self.path.replace("layers.", "layers-").count(".")


@dataclasses.dataclass(frozen=True)
class Counts:
    """All components.

    Args:
        components: parents before their parts.
        total: parameters by the closed form; shared ones once.
        counted: parameters that the network has.
    """

    components: tuple[Count, ...]
    total: int
    counted: int

    @property
    def agree(self) -> bool:
        """Whether closed form and modules agree, in every component that was counted."""
        rows = [row for row in self.components if row.counted is not None]
        return self.total == self.counted and all(row.total == row.counted for row in rows)


def count(model: Transformer) -> Counts:
    """Hold the closed form of a network's configuration against its parameters."""
    closed, found = parameters(model.config), _counted(model)
    rows = [
        Count(
            path=path,
            formula=None if part.formula is None else str(part.formula),
            sizes=dict(part.sizes),
            repeat=times * part.repeat,
            each=part.each,
            total=times * part.total,
            counted=found.get(path, 0) if deep <= _depth_counted(path) else None,
            shared_with=part.shared_with,
        )
        for path, part, times, deep in _walk(closed.root, "", 1, 0)
    ]
    return Counts(tuple(rows), closed.total, sum(p.numel() for p in model.parameters()))


def _walk(parent: Component, above: str, times: int, depth: int) -> Iterator[tuple[str, Component, int, int]]:
    for part in parent.parts:
        path = f"{above}{part.name}"
        yield path, part, times, depth
        yield from _walk(part, f"{path}.", times * part.repeat, depth + 1)


def _depth_counted(path: str) -> int:
    """Layers are counted down to their sublayers, other components as a whole."""
    return 2 if path.startswith(("encoder", "decoder")) else 0


def _counted(model: Transformer) -> dict[str, int]:
    """Elements of each component's parameters; a shared tensor counts where it is met first."""
    found: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        path: list[str] = []
        for step in _component(model.config, name.split(".")):
            path.append(step)
            key = ".".join(path)
            found[key] = found.get(key, 0) + parameter.numel()
    return found


def _component(config: ModelConfig, path: list[str]) -> list[str]:
    first, rest = path[0], path[1:]
    if first not in ("encoder", "decoder"):
        return ["source" if first == "source_embedding" else first]
    if rest[0] != "layers":
        return [first, "relative_positions" if rest[0] == "relative_bias" else rest[0]]
    stack = config.encoder if first == "encoder" else config.decoder
    assert stack is not None
    index = int(rest[1])
    group = next(group for group in layer_groups(stack) if index in group.indices)
    owned = dataclasses.replace(group, indices=group.owners)
    return [first, owned.name, _part(stack.layer_at(index), rest[2:])]


def _part(layer: Layer, path: list[str]) -> str:
    """The part of a layer that a parameter belongs to."""
    if layer.residual == "parallel_shared_norm" and path[0] == "attention_norm":
        return "norm"
    if layer.residual != "sequential" or path[0] == "memory_norm" or path[1] == "body":
        return path[0]
    # A norm on the increment is a second one in a sandwich, elsewhere the only one.
    second = path[1] == "after_body" and layer.placement == "sandwich"
    return f"{path[0]}_{'post_norm' if second else 'norm'}"
