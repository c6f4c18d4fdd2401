"""Where two models first part: their activations side by side, in the order of the dataflow (R39, R40)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from isoform.errors import DataError, ShapeError
from isoform.verify.align import Model
from isoform.verify.comparison import Comparison, Row
from isoform.verify.diagnose.case import layer_of
from isoform.verify.dump import Dump, compare_dump
from isoform.verify.gradients import gradients
from isoform.verify.inner_padding import same_padding
from isoform.verify.measure import coarsest, lines, perturbed, pieces, relative, rounding, verdict
from isoform.verify.points import Point, points, values
from isoform.verify.record import Recording, recorded
from isoform.verify.recording import laid_out
from isoform.verify.spool import IN_MEMORY
from isoform.verify.subject import Inputs


@torch.enable_grad()  # what reads what is found by derivatives
def compare(
    reference: nn.Module | Recording | Dump,
    candidate: nn.Module | Recording | Dump,
    inputs: Inputs | None = None,
    candidate_inputs: Inputs | None = None,
    *,
    backward: bool = False,
    in_memory: int = IN_MEMORY,
) -> Comparison:
    """Align the activations of two models and say where they first part.

    Args:
        reference: a module, a recording of one, or another framework's activations (`read_dump`).
        candidate: likewise; at most one of the two is a dump.
        inputs: what both read, as for `isoform.verify.diagnose`; not needed for recordings.
        candidate_inputs: the same content as the candidate takes it.
        backward: also compare the gradients of the weights; both must be modules. Takes the memory of a
            training step.
        in_memory: bytes of each module's activations to keep in memory, as for `isoform.verify.record`.
            Beside them and the networks it takes about four times the largest activation.

    Raises:
        ShapeError: results whose batch or length differ: not the same content.
        DataError: `backward` with what is no module, a module without inputs, or two dumps.
    """
    if isinstance(reference, Dump) or isinstance(candidate, Dump):
        return _with_dump(reference, candidate, inputs, candidate_inputs, backward, in_memory)
    theirs = inputs if candidate_inputs is None else candidate_inputs
    first = recorded(reference, inputs, "reference", in_memory)
    first, second = same_padding(first, laid_out(recorded(candidate, theirs, "candidate", in_memory), first))
    a, b = Model(first, native=True), Model(second, native=True)
    _same_content(a, b)
    pairs = points(a, b)
    eps = max(coarsest(m) for m in (a, b))
    rows: list[Row] = []
    for node, again in perturbed(a, {p.node_a for p in pairs}, eps):
        rows += [_row(a, b, p, again, eps) for p in pairs if p.node_a == node]
        del again
        first.release()
        second.release()
    if backward:
        if isinstance(reference, Recording) or isinstance(candidate, Recording):
            raise DataError("gradients cannot be compared with a recording; give both modules")
        assert inputs is not None and theirs is not None
        rows += gradients(a, b, (reference, candidate), (inputs, theirs), eps)
    profiles: dict[str, list[float]] = {}
    for point, row in zip(pairs, rows, strict=False):
        if row.differs:
            profiles = _profiles(a, b, point)
            break
    notes = tuple(_notes(a, b))
    return Comparison(first.subject, second.subject, verdict(rows, eps), tuple(rows), profiles, notes)


def _with_dump(
    reference: nn.Module | Recording | Dump,
    candidate: nn.Module | Recording | Dump,
    inputs: Inputs | None,
    candidate_inputs: Inputs | None,
    backward: bool,
    in_memory: int,
) -> Comparison:
    if backward:
        raise DataError("gradients cannot be compared with a dump; give both modules")
    if isinstance(candidate, Dump) and not isinstance(reference, Dump):
        recording = recorded(reference, inputs, "reference", in_memory)
        return compare_dump(Model(recording, native=True), candidate, reference=False)
    if isinstance(reference, Dump) and not isinstance(candidate, Dump):
        theirs = inputs if candidate_inputs is None else candidate_inputs
        recording = recorded(candidate, theirs, "candidate", in_memory)
        return compare_dump(Model(recording, native=True), reference, reference=True)
    raise DataError("two dumps say nothing about a dataflow; one of both must be a module or a recording")


def _same_content(a: Model, b: Model) -> None:
    x, y = a.of_node(a.graph.output), b.of_node(b.graph.output)
    if x is None or y is None or x.shape[:2] != y.shape[:2]:
        shapes = [list(m.graph.values[m.graph.output].shape) for m in (a, b)]
        raise ShapeError(
            f"results of shape {shapes[0]} and {shapes[1]}: these are not the same batch and length"
        )


def _row(a: Model, b: Model, point: Point, again: Tensor, eps: float) -> Row:
    x, y = values(a, b, point)
    paths = a.graph.place(point.node_a)[0], b.graph.place(point.node_b)[0]
    layer = layer_of(a, point.node_a)
    if x is None or y is None or x.shape != y.shape:
        return Row(point.name, layer, *paths, float("inf"), 0.0, ())
    error = relative(x, y, a.real(a.role(point.node_a)))
    expected = rounding(a, point.node_a, point.width_a, again, eps)
    return Row(point.name, layer, *paths, error, expected, tuple(x.shape))


def _profiles(a: Model, b: Model, point: Point) -> dict[str, list[float]]:
    x, y = values(a, b, point)
    if x is None or y is None or x.shape != y.shape or x.dim() != 3:
        return {}
    size = max(float(end) for part in pieces(x) for end in (-part.min(), part.max()))
    real = a.real(a.role(point.node_a))
    places, channel = torch.zeros(x.shape[:2]).double(), torch.zeros(x.shape[2]).double()
    for row, (ours, theirs) in enumerate(zip(x, y, strict=True)):
        for start, part in lines(ours):
            at = slice(start, start + len(part))
            error = (part.double() - theirs[at].double()).abs_().div_(max(size, 1e-30))
            if real.shape == x.shape[:2]:
                error.masked_fill_(~real[row, at, None], 0.0)
            places[row, at] = error.amax(1)
            channel = torch.maximum(channel, error.amax(0))
    out = {"row": places.amax(1), "position": places.amax(0), "channel": channel}
    sites = a.structure.sites
    if sites and "attention" in point.name:
        softmax = a.graph.values[sites[0].softmax]
        heads = softmax.numel() // (a.graph.batch * softmax.shape[-1] * softmax.shape[-2])
        if heads and len(channel) % heads == 0:
            out["head"] = channel.unflatten(0, (heads, -1)).amax(1)
    return {name: error.tolist() for name, error in out.items()}


def _notes(a: Model, b: Model) -> list[str]:
    notes: list[str] = []
    for what, x, y in (
        ("attentions", len(a.structure.sites), len(b.structure.sites)),
        ("feed-forward networks", len(a.structure.inners), len(b.structure.inners)),
        ("sums of the stream", len(a.structure.states), len(b.structure.states)),
    ):
        if x != y:
            notes.append(f"the reference has {x} {what}, the candidate {y}")
    widths = [m.width(m.graph.output) for m in (a, b)]
    if widths[0] != widths[1]:
        notes.append(f"a result has {widths[0]} features in the reference, {widths[1]} in the candidate")
    streams = [m.width(m.structure.states[-1]) if m.structure.states else 0 for m in (a, b)]
    if streams[0] != streams[1]:
        notes.append(f"the stream has {streams[0]} features in the reference, {streams[1]} in the candidate")
    orders = [_axes(m) for m in (a, b)]
    if orders[0] != orders[1]:
        notes.append(f"the reference gives {orders[0]}, the candidate {orders[1]}: compared as [B, T]")
    return [*notes, *_other_inputs(a, b)]


def _axes(model: Model) -> str:
    shape = list(model.graph.values[model.graph.output].shape)
    batch, lengths = model.graph.batch, model.graph.lengths.values()
    swapped = len(shape) > 2 and any(shape[:2] == [n, batch] != [batch, n] for n in lengths)
    return "[T, B]" if swapped else "[B, T]"


def _other_inputs(a: Model, b: Model) -> list[str]:
    """Token ids that are not the same: a comparison of two functions at two places."""
    notes: list[str] = []
    for role, name in a.recording.contents.items():
        ours = a.recording.inputs.get(name)
        theirs = b.recording.inputs.get(b.recording.contents.get(role, ""))
        if ours is None or theirs is None or ours.is_floating_point() or theirs.is_floating_point():
            continue
        if ours.shape != theirs.shape:
            theirs = theirs.t() if ours.shape == theirs.t().shape else ours
        real = a.real(role)
        other = (ours != theirs) & real if real.shape == ours.shape else ours != theirs
        if bool(other.any()):
            count = f"{int(other.sum())} of {int(real.sum())} real positions"
            notes.append(f"the two read other token ids at {count} of the {role}: not the same data")
    return notes
