"""Equal layers gathered, so that a deep stack costs no more to reckon than a shallow one."""

from __future__ import annotations

import dataclasses
import itertools

from isoform.config import Layer, ModelConfig, Stack


def stacks(config: ModelConfig) -> list[tuple[str, Stack]]:
    """The stacks there are, with their names, in the order data passes them."""
    both = (("encoder", config.encoder), ("decoder", config.decoder))
    return [(name, stack) for name, stack in both if stack is not None]


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """Layers of one stack that have the same configuration.

    Attributes:
        layer: their configuration.
        indices: which they are.
        owners: those among them that have parameters of their own (all, without layer sharing).
    """

    layer: Layer
    indices: tuple[int, ...]
    owners: tuple[int, ...]

    @property
    def name(self) -> str:
        """``layers.0-11``, ``layers.0-10/2`` …"""
        return f"layers.{ranges(self.indices)}"


def layer_groups(stack: Stack) -> list[LayerGroup]:
    """Gather equal layers, so that the cost of deep stacks is computed once for each kind of layer."""
    groups: dict[Layer, list[int]] = {}
    variants = {index for variant in stack.variants for index in variant.layers}
    for index in range(stack.n_layers):
        layer = stack.layer_at(index) if index in variants else stack.layer
        owner = stack.owner(index)
        if owner != index:
            # Another layer's modules, read under this layer's own window and positions.
            own, shared = layer.attention, stack.layer_at(owner)
            here = shared.attention.model_copy(update={"window": own.window, "positions": own.positions})
            layer = shared.model_copy(update={"attention": here})
        groups.setdefault(layer, []).append(index)
    return [
        LayerGroup(layer, tuple(found), tuple(i for i in found if stack.owner(i) == i))
        for layer, found in groups.items()
    ]


def ranges(numbers: tuple[int, ...]) -> str:
    """``0-3,6`` for 0, 1, 2, 3, 6; ``0-8/2`` for 0, 2, 4, 6, 8."""
    steps = {b - a for a, b in itertools.pairwise(numbers)}
    if len(numbers) > 2 and len(steps) == 1 and steps != {1}:
        return f"{numbers[0]}-{numbers[-1]}/{steps.pop()}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
