"""Where two models first part: their activations side by side, in the order of the dataflow (R39, R40)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor, nn

from isoform.errors import DataError, ShapeError
from isoform.verify.align import Model, Part, match_rows, whole
from isoform.verify.derivatives import derivatives
from isoform.verify.diagnose.case import layer_of
from isoform.verify.record import Recording, record
from isoform.verify.subject import Inputs, Subject, main_tensor, mode

MARGIN = 64.0
"""How far above the measured amplification of one unit in the last place a difference must be to count."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One activation (or gradient) of both models.

    Args:
        name: what it is.
        layer: its layer, None outside of layers.
        reference, candidate: module paths.
        error: largest difference, relative to the largest value of the reference.
        expected: the difference that rounding explains at this point.
        shape: as compared, batch and time first.
    """

    name: str
    layer: int | None
    reference: str
    candidate: str
    error: float
    expected: float
    shape: tuple[int, ...]

    @property
    def differs(self) -> bool:
        """More than rounding."""
        return not self.error <= self.expected


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two models side by side.

    Args:
        reference, candidate: their classes.
        verdict: "equivalent"; "noise": more than a few units in the last place, but no more than rounding
            explains; "differs".
        rows: aligned activations in order of the dataflow, gradients after them.
        profiles: of the first divergence: error by ``position``, ``row``, ``channel``, ``head``.
        notes: what has no counterpart.
    """

    reference: str
    candidate: str
    verdict: Literal["equivalent", "noise", "differs"]
    rows: tuple[Row, ...]
    profiles: dict[str, list[float]]
    notes: tuple[str, ...] = ()

    @property
    def first_divergence(self) -> Row | None:
        """The first row that rounding does not explain."""
        return next((row for row in self.rows if row.differs), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data with stable keys."""
        rows = [{**dataclasses.asdict(row), "differs": row.differs} for row in self.rows]
        first = self.first_divergence
        return {
            **dataclasses.asdict(self),
            "rows": rows,
            "first_divergence": None if first is None else dataclasses.asdict(first),
        }

    def __str__(self) -> str:
        lines = [f"{self.reference} and {self.candidate}: {self.verdict}"]
        for row in self.rows:
            mark = "≠" if row.differs else " "
            layer = "" if row.layer is None else f"layer {row.layer} "
            lines.append(f"{mark} {row.error:9.2e}  (rounding {row.expected:.0e})  {layer}{row.name}")
        return "\n".join([*lines, *(f"note: {n}" for n in self.notes)])

    def _repr_html_(self) -> str:
        from html import escape

        body = "".join(
            f"<tr><td>{'≠' if r.differs else ''}</td><td>{'' if r.layer is None else r.layer}</td>"
            f"<td>{escape(r.name)}</td><td>{r.error:.2e}</td><td>{r.expected:.0e}</td></tr>"
            for r in self.rows
        )
        caption = escape(f"{self.reference} and {self.candidate}: {self.verdict}")
        return f"<table><caption>{caption}</caption>{body}</table>"


def compare(
    reference: nn.Module | Recording,
    candidate: nn.Module | Recording,
    inputs: Inputs | None = None,
    candidate_inputs: Inputs | None = None,
    *,
    backward: bool = False,
) -> Comparison:
    """Align the activations of two models and say where they first part.

    Args:
        reference: a module or a recording of one.
        candidate: likewise.
        inputs: what both read, as for `isoform.verify.diagnose`; not needed for recordings.
        candidate_inputs: the same content as the candidate takes it.
        backward: also compare the gradients of the weights; both must be modules.

    Raises:
        ShapeError: results whose batch or length differ: not the same content.
        DataError: `backward` with a recording, or a module without inputs.
    """
    theirs = inputs if candidate_inputs is None else candidate_inputs
    first, second = _recorded(reference, inputs), _recorded(candidate, theirs)
    a, b = Model(first, native=True), Model(second, native=True)
    _same_content(a, b)
    points = _points(a, b)
    eps = max(_eps(first), _eps(second))
    moved = _perturbed(a, [p.node_a for p in points], eps)
    rows = [_row(a, b, p, moved, eps) for p in points]
    notes = _notes(a, b)
    if backward:
        if isinstance(reference, Recording) or isinstance(candidate, Recording):
            raise DataError("gradients cannot be compared with a recording; give both modules")
        assert inputs is not None and theirs is not None
        rows += _gradients(a, b, reference, candidate, inputs, theirs, eps)
    worst = max((row.error for row in rows), default=0.0)
    # Points on the way may be in another form (another factor, another order of heads); the result may not.
    ends = [r for r in rows if r.name in ("result", "gradient")]
    if any(r.differs for r in ends):
        verdict = "differs"
    else:
        verdict = "equivalent" if worst <= 64 * 2.0**-23 and eps < 1e-6 else "noise"
    profiles: dict[str, list[float]] = {}
    for point, row in zip(points, rows, strict=False):
        if row.differs:
            profiles = _profiles(a, b, point)
            break
    return Comparison(first.subject, second.subject, verdict, tuple(rows), profiles, tuple(notes))


@dataclasses.dataclass(eq=False)
class _Point:
    name: str
    node_a: int
    node_b: int
    width_a: int
    width_b: int
    columns: Tensor | None = None
    columns_a: Tensor | None = None
    heads: int = 0


def _recorded(model: nn.Module | Recording, inputs: Inputs | None) -> Recording:
    if isinstance(model, Recording):
        return model
    if inputs is None:
        raise DataError(f"{type(model).__name__}: no inputs given; expected those of its forward")
    return record(model, inputs)


def _same_content(a: Model, b: Model) -> None:
    x, y = a.of_node(a.graph.output), b.of_node(b.graph.output)
    if x is None or y is None or x.shape[:2] != y.shape[:2]:
        shapes = [list(m.graph.values[m.graph.output].shape) for m in (a, b)]
        raise ShapeError(
            f"results of shape {shapes[0]} and {shapes[1]}: these are not the same batch and length"
        )


def _points(a: Model, b: Model) -> list[_Point]:
    """Points that both models have, in the reference's order."""
    found: list[_Point] = []
    for key, node in a.states.items():
        other = b.states.get(key)
        if other is not None:
            name = "token vectors" if node in a.structure.entries else "sum of the stream"
            width = a.graph.values[node].shape[-1]
            found.append(_Point(name, node, other, width, b.graph.values[other].shape[-1]))
            ta, tb = a.structure.trunk.get(node, node), b.structure.trunk.get(other, other)
            if ta != node or tb != other:
                found.append(_Point("stream", ta, tb, width, width))
    for key, node in a.reads.items():
        other = b.reads.get(key)
        if other is not None:
            width = a.graph.values[node].shape[-1]
            what = {"site": "input of attention", "inner": "input of feed-forward"}.get(
                str(key[0]), "end of the stack"
            )
            found.append(_Point(what, node, other, width, b.graph.values[other].shape[-1]))
    for x, y in zip(a.structure.sites, b.structure.sites, strict=False):
        kind = "cross-attention" if x.cross else "self-attention"
        for name, pa, pb in (("queries", x.q, y.q), ("keys", x.k, y.k), ("values", x.v, y.v)):
            found += _maps(f"{kind} {name}", pa, pb)
        if x.out is not None and y.out is not None:
            ca = match_rows(x.out.weight.t().double(), y.out.weight.t().double())
            columns = ca.index if ca.complete else None
            w = x.out.weight.shape[1]
            found.append(_Point(f"{kind} context", x.out.read, y.out.read, w, y.out.weight.shape[1], columns))
            found += _maps(f"{kind} output", whole([x.out]), whole([y.out]))
    for x, y in zip(a.structure.inners, b.structure.inners, strict=False):
        if len(x.sources) == len(y.sources):
            for m, n in zip(x.sources, y.sources, strict=True):
                found += _maps("feed-forward input map", whole([m]), whole([n]))
        found += _maps("feed-forward output", whole([x.out]), whole([y.out]))
    found.append(
        _Point(
            "result",
            a.graph.output,
            b.graph.output,
            a.graph.values[a.graph.output].shape[-1],
            b.graph.values[b.graph.output].shape[-1],
        )
    )
    unique: dict[tuple[int, str], _Point] = {}
    for point in found:
        key = point.node_a, "" if point.columns_a is None else point.name
        unique.setdefault(key, point)
    return sorted(unique.values(), key=lambda p: p.node_a)


def _maps(name: str, pa: list[Part], pb: list[Part]) -> list[_Point]:
    if len(pa) != 1 or len(pb) != 1:
        return []
    x, y = pa[0], pb[0]
    wa, wb = _taken(x), _taken(y)
    if wa.shape != wb.shape:
        return []
    columns_a, columns = x.columns, y.columns
    if not _alike(wa, wb):
        rows = match_rows(wa.double(), wb.double())
        if rows.complete:
            columns_a = x.columns[rows.index]
    full = len(columns_a) == x.linear.weight.shape[0] and bool((columns_a.diff() == 1).all())
    return [
        _Point(
            name,
            x.linear.out,
            y.linear.out,
            x.linear.weight.shape[0],
            y.linear.weight.shape[0],
            columns_a=None if full and len(columns) == y.linear.weight.shape[0] else columns_a,
            columns=None if full and len(columns) == y.linear.weight.shape[0] else columns,
        )
    ]


def _taken(part: Part) -> Tensor:
    weight = part.linear.weight
    return weight if len(part.columns) == weight.shape[0] else weight[part.columns]


def _alike(a: Tensor, b: Tensor) -> bool:
    return bool((a[:2].double() - b[:2].double()).abs().max() <= 1e-2 * a[:2].abs().max().clamp(min=1e-30))


def _eps(recording: Recording) -> float:
    kinds = [p.dtype for p in recording.parameters.values() if p.is_floating_point()]
    kinds += [recording.result().dtype]
    return max(torch.finfo(k).eps for k in kinds if k.is_floating_point)


def _perturbed(a: Model, nodes: list[int], eps: float) -> dict[int, Tensor]:
    """The reference again, with one unit in the last place at the token vectors."""
    generator = torch.Generator().manual_seed(2)
    given: dict[int, Tensor] = {}
    for entry in a.structure.entries:
        value = a.graph.values[entry]
        sign = torch.randint(0, 2, value.shape, generator=generator, dtype=value.dtype) * 2 - 1
        given[entry] = value * (1 + eps * sign)
    if not given:
        return {}
    with torch.no_grad():
        return a.graph.evaluate_all(nodes, given)


def _row(a: Model, b: Model, point: _Point, moved: dict[int, Tensor], eps: float) -> Row:
    x, y = _values(a, b, point)
    role = a.role(point.node_a)
    layer = layer_of(a, point.node_a)
    paths = a.graph.place(point.node_a)[0], b.graph.place(point.node_b)[0]
    if x is None or y is None or x.shape != y.shape:
        return Row(point.name, layer, *paths, float("inf"), 0.0, ())
    again = moved.get(point.node_a)
    noise = 0.0
    if again is not None:
        z = a.graph.canonical(again, point.width_a, point.node_a)
        if z is not None:
            full = a.graph.canonical(a.graph.values[point.node_a], point.width_a, point.node_a)
            assert full is not None
            noise = _error(full, z, a, role)
    return Row(point.name, layer, *paths, _error(x, y, a, role), MARGIN * max(noise, eps), tuple(x.shape))


def _values(a: Model, b: Model, point: _Point) -> tuple[Tensor | None, Tensor | None]:
    x = a.graph.canonical(a.graph.values[point.node_a], point.width_a, point.node_a)
    y = b.graph.canonical(b.graph.values[point.node_b], point.width_b, point.node_b)
    if x is None or y is None:
        return None, None
    if point.columns_a is not None:
        x = x[..., point.columns_a]
    elif point.columns is not None:
        x = x[..., point.columns]
        return x, y
    if point.columns is not None:
        y = y[..., point.columns]
    return x, y


def _error(x: Tensor, y: Tensor, a: Model, role: str) -> float:
    real = a.real(role)
    if x.shape[:2] == real.shape and not bool(real.all()):
        x, y = x[real], y[real]
    low, high = (x - y.to(x)).aminmax()
    least, most = x.aminmax()
    value = max(-float(low), float(high)) / max(-float(least), float(most), 1e-30)
    return float("inf") if value != value else value


def _profiles(a: Model, b: Model, point: _Point) -> dict[str, list[float]]:
    x, y = _values(a, b, point)
    if x is None or y is None or x.shape != y.shape or x.dim() != 3:
        return {}
    error = (x.double() - y.double()).abs() / x.double().abs().max().clamp(min=1e-30)
    real = a.real(a.role(point.node_a))
    if real.shape == error.shape[:2]:
        error = torch.where(real[..., None], error, 0.0)
    out = {
        "row": error.amax((1, 2)).tolist(),
        "position": error.amax((0, 2)).tolist(),
        "channel": error.amax((0, 1)).tolist(),
    }
    sites = a.structure.sites
    if sites and "attention" in point.name:
        softmax = a.graph.values[sites[0].softmax]
        heads = softmax.numel() // (a.graph.batch * softmax.shape[-1] * softmax.shape[-2])
        if heads and error.shape[-1] % heads == 0:
            out["head"] = error.unflatten(-1, (heads, -1)).amax((0, 1, 3)).tolist()
    return out


def _notes(a: Model, b: Model) -> list[str]:
    notes: list[str] = []
    for what, x, y in (
        ("attentions", len(a.structure.sites), len(b.structure.sites)),
        ("feed-forward networks", len(a.structure.inners), len(b.structure.inners)),
        ("sums of the stream", len(a.structure.states), len(b.structure.states)),
    ):
        if x != y:
            notes.append(f"the reference has {x} {what}, the candidate {y}")
    return notes


def _gradients(
    a: Model, b: Model, first: nn.Module, second: nn.Module, inputs: Inputs, theirs: Inputs, eps: float
) -> list[Row]:
    """Gradients of a fixed weighted sum of the results, for each weight matrix both have."""
    grads: list[dict[str, Tensor]] = []
    for model, module, given in ((a, first, inputs), (b, second, theirs)):
        subject = Subject(module, given)
        with mode(module, training=False), torch.enable_grad():
            out = main_tensor(module(**subject.kwargs))
            value = model.graph.canonical(out, out.shape[-1], model.graph.output)
            assert value is not None
            real = model.real(model.role(model.graph.output))
            generator = torch.Generator().manual_seed(4)
            weight = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
            if real.shape == value.shape[:2]:
                value, weight = value[real], weight[real]
            named = {n: p for n, p in module.named_parameters() if p.requires_grad}
            found = derivatives((value * weight).sum(), list(named.values()))
        grads.append({n: g for n, g in zip(named, found, strict=True) if g is not None})
    rows: list[Row] = []
    parameters = [m.recording.parameters for m in (a, b)]
    for name, grad in grads[0].items():
        value = parameters[0][name]
        if value.dim() < 2:
            continue
        for other, again in grads[1].items():
            twin = parameters[1][other]
            if value.shape == twin.shape and _alike(value, twin):
                x, y = grad, again
            elif value.shape == twin.t().shape and twin.dim() == 2 and _alike(value, twin.t()):
                x, y = grad, again.t()
            else:
                continue
            error = float((x.double() - y.double()).abs().max() / x.double().abs().max().clamp(min=1e-30))
            rows.append(Row("gradient", None, name, other, error, 1e4 * eps, tuple(x.shape)))
            break
    return rows
