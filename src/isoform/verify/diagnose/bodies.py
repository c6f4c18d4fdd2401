"""What a feed-forward network does between its maps: it is asked, on numbers made for the purpose."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from isoform.verify.align import Inner, Model, filled, values_of
from isoform.verify.diagnose.routers import EXPERTS
from isoform.verify.diagnose.unary import Step, gap, identify

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu (tanh)": lambda x: F.gelu(x, approximate="tanh"),
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "relu²": lambda x: F.relu(x).square(),
    "relu6": F.relu6,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "elu": F.elu,
    "selu": F.selu,
    "celu": F.celu,
    "leaky relu": F.leaky_relu,
    "softplus": F.softplus,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "hard sigmoid": F.hardsigmoid,
    "softsign": F.softsign,
    "laplace": lambda x: 0.5 * (1 + torch.erf((x - 0.707107) / (0.282095 * 2**0.5))),
    "gelu·10": lambda x: F.gelu(x).clamp(-10, 10),
}


CLOSE = 1e-6


LARGE = 300.0


Run = Callable[[Tensor, int, int], Tensor]
"""What a node, of so many features, is for what the maps in front give."""


@dataclasses.dataclass(eq=False)
class Body:
    """What a feed-forward network does between its maps.

    Args:
        form: "pointwise", "gated", "product" (the activation of a product), "other".
        activation: its name, None where it is none that is known.
        gate: columns that go through the activation; the others are the content.
        after: a norm after the activation.
        shift: what is added in front of the activation, ``[columns]``.
    """

    form: str
    activation: str | None = None
    gate: Tensor | None = None
    after: Step | None = None
    shift: Tensor | None = None


def expert_function(model: Model, inner: Inner) -> Run:
    """An expert between its maps as a function of ``[1, tokens, features]``, whatever tokens these are."""

    def run(x: Tensor, target: int, features: int) -> Tensor:
        given: dict[int, Tensor] = {}
        at = 0
        for linear in inner.sources:
            size, value = linear.weight.shape[0], given.get(linear.out, model.graph.values[linear.out])
            own = x[..., at : at + size]
            given[linear.out] = (
                own.reshape(value.shape) if linear.box is None else linear.box.put(value, own[0])
            )
            at += size
        out = model.graph.evaluate(target, given)
        if inner.out.box is None:
            return out.reshape(1, -1, features)
        if target != inner.out.read:
            return x.new_full((*x.shape[:2], features), float("nan"))
        return inner.out.box.take(out)[None]

    return run


def tokens_of(model: Model, inner: Inner) -> int:
    """How many tokens an expert gets."""
    first = inner.sources[0]
    value = model.graph.values[first.out]
    return value.numel() // first.weight.shape[0] if first.box is None else len(first.box.take(value))


def body_function(model: Model, inner: Inner) -> tuple[Run, torch.Size] | None:
    """A feed-forward network between its maps, and the shape of what it takes; None: no clear layout."""
    parts = inner.parts
    if inner.index >= EXPERTS:
        size = sum(s.weight.shape[0] for s in inner.sources)
        return expert_function(model, inner), torch.Size((1, tokens_of(model, inner), size))
    value = values_of(model, parts)
    if value is None:
        return None

    def run(x: Tensor, target: int, features: int) -> Tensor:
        given: dict[int, Tensor] = {}
        filled(model, parts, x, given)
        found = model.graph.canonical(model.graph.evaluate(target, given), features, target)
        return x.new_full((*x.shape[:2], features), float("nan")) if found is None else found

    return run, value.shape


@dataclasses.dataclass(eq=False)
class Inside:
    """A body to be looked into.

    Attributes:
        run: what comes out for ``[B, T, columns]``.
        values: what its operations give for that, ``[B, T, …]`` by node.
        put: what comes out where a node has another value.
    """

    run: Callable[[Tensor], Tensor]
    values: Callable[[Tensor], dict[int, Tensor]]
    put: Callable[[Tensor, int, Tensor], Tensor]


def inside(model: Model, inner: Inner) -> tuple[Inside, torch.Size] | None:
    """A feed-forward network between its maps, and the shape of what it takes; None: no clear layout."""
    found, graph = body_function(model, inner), model.graph
    if found is None:
        return None
    whole_run, shape = found
    end, width, parts = inner.out.read, inner.out.weight.shape[1], inner.parts
    region = [] if inner.index >= EXPERTS else graph.region(end, [s.out for s in inner.sources])

    def values(x: Tensor) -> dict[int, Tensor]:
        return {n: whole_run(x, n, graph.values[n].shape[-1]) for n in region}

    def put(x: Tensor, node: int, value: Tensor) -> Tensor:
        given: dict[int, Tensor] = {}
        filled(model, parts, x, given)
        given[node] = graph.shaped(value, node, value.shape[-1])
        out = graph.canonical(graph.evaluate(end, given), width, end)
        assert out is not None
        return out

    return Inside(lambda x: whole_run(x, end, width), values, put), shape


def identify_body(model: Model, inner: Inner) -> Body:
    """Ask a feed-forward network what it does, on numbers made for the purpose."""
    width = inner.out.weight.shape[1]
    found = body_function(model, inner)
    if found is None:
        return Body("other")
    raw, shape = found

    def run(x: Tensor, target: int = inner.out.read, features: int = width) -> Tensor:
        return raw(x, target, features)

    generator = torch.Generator().manual_seed(5)
    x = 2.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
    y = run(x)
    if torch.equal(y, run(0.5 * x.flip(-1))):
        return Body("other")  # whatever comes in
    if shape[-1] == width:
        name = _named(x, y)
        if name is not None:
            return Body("pointwise", name)
        shift = (run(x + LARGE) - x - LARGE).flatten(0, 1).mean(0)  # most activations end in a straight line
        name = _named(x + shift, y) if float(shift.abs().max()) < LARGE / 10 else None
        if name is not None:
            return Body("pointwise", name, shift=shift)
        if _local(run, x, y, [0]):
            return Body("pointwise", None)
        return _with_norm(model, inner, run, x)
    if shape[-1] == 2 * width:
        half = torch.arange(width)
        layouts = [
            (half, half + width),
            (half + width, half),
            (2 * half, 2 * half + 1),
            (2 * half + 1, 2 * half),
        ]
        for gate, content in layouts:
            name = _named(x[..., gate], y / x[..., content])
            if name is not None and name != "identity":
                return Body("gated", name, gate)
            name = _named(x[..., gate], y / (x[..., content] + 1))
            if name is not None and name != "identity":
                return Body("gated", f"{name}, content + 1", gate)
        for first, second in (layouts[0], layouts[2]):
            name = _named(x[..., first] * x[..., second], y)
            if name is not None:
                return Body("product", name, first)
        for gate, content in layouts:
            ratio = y / x[..., content]
            again = x.clone()
            again[..., content] *= 0.5
            mine = [int(gate[0]), int(content[0])]
            if gap(run(again) / again[..., content], ratio) < CLOSE and _local(run, x, y, mine):
                return Body("gated", None, gate)
    return Body("other")


def _local(run: Callable[..., Tensor], x: Tensor, y: Tensor, columns: list[int]) -> bool:
    """Whether the first output alone depends on these columns, and on nothing else."""
    inside, outside = x.clone(), 0.5 * x
    inside[..., columns] *= 0.5
    outside[..., columns] = x[..., columns]
    if gap(run(inside)[..., 1:], y[..., 1:]) > CLOSE or gap(run(outside)[..., :1], y[..., :1]) > CLOSE:
        return False
    later = x.clone()
    later[:, :-1] *= 0.5
    return x.shape[1] < 2 or gap(run(later)[:, -1], y[:, -1]) < CLOSE


def _with_norm(model: Model, inner: Inner, run: Callable[..., Tensor], x: Tensor) -> Body:
    """An activation and then a norm, as in front of a masked-language-model head."""
    for middle in model.structure.chain(inner.out.read)[1:]:
        if model.graph.values[middle].shape[-1] != x.shape[-1] or middle in model.structure.by_out:
            continue
        name = _named(x, run(x, middle, x.shape[-1]))
        if name is None:
            continue

        def tail(z: Tensor, middle: int = middle) -> Tensor:
            shaped = model.graph.shaped(z, middle, z.shape[-1])
            out = model.graph.evaluate(inner.out.read, {middle: shaped})
            found = model.graph.canonical(out, z.shape[-1], inner.out.read)
            assert found is not None
            return found

        step = identify(tail, x.shape)
        if step.kind != "other" and not step.identity:
            return Body("pointwise", name, None, step)
    return Body("other")


def _named(x: Tensor, y: Tensor) -> str | None:
    # A few channels tell the activation; all of them confirm it.
    few = [(gap(f(x[..., :16]), y[..., :16]), name) for name, f in ACTIVATIONS.items()]
    error, name = min(few)
    return name if error < CLOSE and gap(ACTIVATIONS[name](x), y) < CLOSE else None


def told(body: Body) -> str:
    if body.form == "other":
        return "does something of its own between the two maps"
    name = body.activation or "an activation of its own"
    after = f", then {body.after}" if body.after is not None else ""
    form = {
        "pointwise": "applies {}",
        "gated": "multiplies {} of the gate with the content",
        "product": "applies {} to the product of gate and content",
    }
    return form[body.form].format(name) + after
