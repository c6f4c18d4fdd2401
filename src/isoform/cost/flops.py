"""FLOPs in closed form per component, forward and backward (R28). One multiply-add is two FLOPs.

Counted are the products of matrices: projections and the two products of attention, as every published
convention does and as ``torch.utils.flop_counter`` counts them. Normalisation, activations, softmax, masks,
rotation, residual sums and look-ups are not: they are bound by memory, see `isoform.cost.roofline`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from isoform.config import ModelConfig
from isoform.cost.formula import Formula
from isoform.cost.groups import stacks
from isoform.cost.parameters import Parameters, parameters
from isoform.cost.products import Product, products
from isoform.cost.workload import Workload


@dataclasses.dataclass(frozen=True)
class ComponentFlops:
    """The FLOPs of one component over the rows of one device.

    Attributes:
        name: dotted, as in `isoform.cost.parameters`, with ``scores`` and ``read`` for attention's products.
        formula: closed form of one forward occurrence.
        sizes: the value of every symbol of the formula.
        uses: occurrences in one forward pass.
        forward: all occurrences, over all (query, key) pairs, as dense kernels compute them.
        backward: twice the forward: one product for the input's gradient and one for the other operand's.
        recomputed: what layer recomputation runs again.
        visible: ``forward`` over the pairs that causality and windows allow.
    """

    name: str
    formula: Formula
    sizes: dict[str, int]
    uses: int
    forward: int
    backward: int
    recomputed: int
    visible: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with stable keys."""
        return {**dataclasses.asdict(self), "formula": str(self.formula)}


@dataclasses.dataclass(frozen=True)
class Conventions:
    """The same step by other people's rules, to compare published figures with.

    Attributes:
        kaplan: C ≈ 6N a token, 2N without a backward pass; N without tables and positions, attention's
            products left out (Kaplan et al. 2020, section 2.1).
        palm: 6N + 12LHQT a token, a third of it without a backward pass; N all parameters, L layers, H heads
            of width Q, T keys, no halving for causality (Chowdhery et al. 2022, appendix B).
        palm_active: the same with N the parameters that one token passes through (experts).
    """

    kaplan: int
    palm: int
    palm_active: int


@dataclasses.dataclass(frozen=True)
class Flops:
    """The FLOPs of one step, on the device with the most rows.

    Attributes:
        forward, backward, recomputed: sums over the components.
        model: forward + backward: what the mathematics asks for, the numerator of model FLOPs utilisation.
        hardware: ``model`` + ``recomputed``: what is really executed, that of hardware FLOPs utilisation.
        visible: ``model`` with attention over visible pairs only: what a kernel that skips forbidden blocks
            can come down to.
        tokens: tokens of the step (source and target, each once).
        per_token: ``model / tokens``.
        all_experts: ``model`` if every expert ran on every token, as traced graphs do.
        conventions: published rules of thumb for the same step.
        components: one entry a product.
    """

    forward: int
    backward: int
    recomputed: int
    model: int
    hardware: int
    visible: int
    tokens: int
    per_token: float
    all_experts: int
    conventions: Conventions
    components: tuple[ComponentFlops, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with stable keys."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data["conventions"] = dataclasses.asdict(self.conventions)
        data["components"] = [component.to_dict() for component in self.components]
        return data


def flops(config: ModelConfig, work: Workload) -> Flops:
    """Count the FLOPs of one step from the configuration alone.

    Equal to ``torch.utils.flop_counter.FlopCounterMode`` around the explicit attention of `isoform.nn`,
    forward and backward. Around fused attention the counter adds what the kernel recomputes in the backward
    pass (half of attention's forward), and on CPU it knows no fused attention at all.

    Raises:
        ConfigError: work that this network cannot do.
    """
    work.check(config)
    found = products(config, work)
    components = tuple(_component(product, work) for product in found)
    forward, backward, recomputed, visible = (
        sum(getattr(c, name) for c in components) for name in ("forward", "backward", "recomputed", "visible")
    )
    tokens = work.rows * (1 if work.mode == "decode" else work.length + (work.source_length or 0))
    train = work.mode == "train"
    experts = sum(
        (c.forward + c.backward) // p.sizes["k"] * (p.sizes["E"] - p.sizes["k"])
        for p, c in zip(found, components, strict=True)
        if ".experts." in p.name
    )
    return Flops(
        forward=forward,
        backward=backward,
        recomputed=recomputed,
        model=forward + backward,
        hardware=forward + backward + recomputed,
        visible=(3 if train else 1) * visible,
        tokens=tokens,
        per_token=(forward + backward) / tokens,
        all_experts=forward + backward + experts,
        conventions=_conventions(config, work, parameters(config), tokens),
        components=components,
    )


def _component(product: Product, work: Workload) -> ComponentFlops:
    sizes = dict(product.sizes)
    forward = 2 * product.multiply_adds.value(sizes) * product.uses
    train = work.mode == "train"
    again = train and product.in_layer and work.recomputation == "layer"
    used = product.multiply_adds.symbols() | product.visible.symbols()
    return ComponentFlops(
        name=product.name,
        formula=2 * product.multiply_adds,
        sizes={name: size for name, size in sizes.items() if name in used},
        uses=product.uses,
        forward=forward,
        backward=2 * forward if train else 0,
        recomputed=forward if again else 0,
        visible=2 * product.visible.value(sizes) * product.uses,
    )


def _conventions(config: ModelConfig, work: Workload, count: Parameters, tokens: int) -> Conventions:
    share = 3 if work.mode == "train" else 1
    attention = 0
    for name, stack in stacks(config):
        keys = work.source_length if name == "encoder" and work.source_length else work.length
        if work.mode == "decode" and name == "encoder":
            continue
        rows = work.rows * (1 if work.mode == "decode" else keys)
        widths = (layer.attention.n_heads * layer.attention.head_width for layer in stack.layers())
        attention += 4 * rows * keys * sum(widths)
    return Conventions(
        kaplan=share * 2 * count.without_lookups * tokens,
        palm=share * (2 * count.total * tokens + attention),
        palm_active=share * (2 * count.active * tokens + attention),
    )
