"""Why do two Transformers differ? Every fault by name, also where several are stacked (R39)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from isoform.errors import ShapeError
from isoform.verify.align import Model, Site
from isoform.verify.diagnose import attention, ending, feed_forward, losses, precision, steps, stream, weights
from isoform.verify.diagnose.case import Case
from isoform.verify.diagnose.pairing import alone, pair, pairs
from isoform.verify.diagnose.parts import Linear
from isoform.verify.diagnose.probe import alike, fixed, longer, other_weights, reweighted
from isoform.verify.diagnose.report import Diagnosis, Finding, Place
from isoform.verify.diagnose.structure import Structure
from isoform.verify.diagnose.unary import gap
from isoform.verify.record import Recording, record
from isoform.verify.recording import laid_out
from isoform.verify.stepping import Step
from isoform.verify.subject import Inputs

_MASKS = frozenset(("mask-polarity", "cross-mask", "causality", "sliding-window"))

__all__ = ["Diagnosis", "Finding", "Place", "diagnose"]


def diagnose(
    reference: nn.Module | Recording,
    candidate: nn.Module | Recording,
    inputs: Inputs | None = None,
    candidate_inputs: Inputs | None = None,
    *,
    probe: bool = True,
    step: Step | None = None,
    candidate_step: Step | None = None,
) -> Diagnosis:
    """Say why two models are not the same function.

    Args:
        reference: one model; a `Recording` of it serves too.
        candidate: the other one. Neither is taken to be the right one.
        inputs: what both read: keyword arguments of ``forward`` as a dict, positional ones as a tuple, or one
            tensor. Not needed for recordings.
        candidate_inputs: the same content in the form that the candidate takes; default: `inputs`.
        probe: also look for faults that these weights hide, by giving both models others, and for those of
            losses and of cached steps, where both models give a loss for ``labels`` or keep a past.
        step: the reference's cached step, (ids ``[B, 1]``, state) → (logits, state); default:
            ``past_key_values``, where the module takes it.
        candidate_step: the candidate's.

    Returns:
        The verdict and every cause that was found. There are no findings with "equivalent" or "noise".

    Raises:
        ShapeError: results of different shape for what should be the same content.
    """
    theirs = inputs if candidate_inputs is None else candidate_inputs
    first, plain = _recorded(reference, inputs), _recorded(candidate, theirs)
    second = laid_out(plain, first)
    turned = any(second.inputs[n].shape != plain.inputs[n].shape for n in plain.reals.values())
    rounding = _rounding(first, second)
    a, b = Model(first, rounding), Model(second, rounding)
    found = examine(a, b)
    if isinstance(reference, nn.Module) and isinstance(candidate, nn.Module):
        assert inputs is not None and theirs is not None
        if probe or step is not None or candidate_step is not None:
            found = _beside(found, _around((reference, candidate), (inputs, theirs), (step, candidate_step)))
    if not probe or rounding is not None:
        return found
    if isinstance(reference, nn.Module) and isinstance(candidate, nn.Module) and not turned:
        assert inputs is not None and theirs is not None
        pair = longer(reference, candidate, inputs, theirs)
        if pair is not None:
            a, b = Model(pair[0]), Model(pair[1])
    if fixed(a) or fixed(b) or not alike(a, b):
        return found
    ours, other = other_weights(a, b)
    return _with_latent(found, examine(reweighted(a, ours), reweighted(b, other), latent=True))


def _around(
    modules: tuple[nn.Module, nn.Module],
    inputs: tuple[Inputs, Inputs],
    functions: tuple[Step | None, Step | None],
) -> list[Finding]:
    """What one forward pass does not show: the loss, and steps with a cache."""
    loss = losses.check(*modules, *inputs)
    return [*([] if loss is None else [loss]), *steps.check(*modules, *inputs, functions, examine)]


def _beside(found: Diagnosis, more: list[Finding]) -> Diagnosis:
    if not more:
        return found
    return dataclasses.replace(found, verdict="differs", findings=(*found.findings, *more))


def _with_latent(found: Diagnosis, probed: Diagnosis) -> Diagnosis:
    """What the probe shows and the models as given do not."""
    known = set(found.kinds())
    latent = tuple(f for f in probed.findings if f.kind not in known)
    if found.verdict == "differs" and not all(f.kind != "unexplained" for f in found.findings):
        latent = tuple(f for f in latent if f.kind != "unexplained")
    if not latent:
        return found
    # With unit gains two norms in a row look like one with another ε.
    more = [f for f in latent if f.kind in ("norm-missing", "norm-placement")]
    norms = {(p.part, p.layer) for f in more for p in f.where}
    kept = tuple(
        f for f in found.findings if f.kind != "norm-eps" or not {(p.part, p.layer) for p in f.where} <= norms
    )
    return dataclasses.replace(found, verdict="differs", findings=(*kept, *latent))


def _recorded(model: nn.Module | Recording, inputs: Inputs | None) -> Recording:
    if isinstance(model, Recording):
        return model
    if inputs is None:
        raise ShapeError(f"{type(model).__name__}: no inputs given; expected those of its forward")
    return record(model, inputs)


def examine(a: Model, b: Model, *, latent: bool = False) -> Diagnosis:
    """Compare two models on the values that they hold."""
    first, second = a.recording, b.recording
    rounding = a.graph.rounding or _constants(first) or _constants(second)
    ours, theirs = result(a), result(b)
    if ours.shape[:2] != theirs.shape[:2]:
        raise ShapeError(
            f"results of shape {list(ours.shape)} and {list(theirs.shape)}: not the same content"
        )
    pair(a, b)
    case = Case(a, b)
    if rounding is not None:  # constants are kept in the coarser dtype too
        case.constants = case.tolerance = 2 * torch.finfo(rounding).eps
    role = a.role(a.graph.output)
    difference = case.differ(ours, theirs, role)
    precision.check(case)
    unit = 2.0**-23 if rounding is None else torch.finfo(rounding).eps / 2
    allowed = max(_allowance(m, unit) for m in (a, b))
    evidence: dict[str, Any] = {"relative_difference": difference, "explained_by_rounding": allowed}
    if stream.EXACT < difference <= allowed:
        stream.check_small(case)
    if latent and difference <= allowed:
        _beyond(case)
    if difference <= allowed and not case.raw:
        native = _native(first, second, a, b, role)
        verdict = "equivalent" if rounding is None and native <= 1e-3 else "noise"
        return Diagnosis(first.subject, second.subject, verdict, (), {**evidence, "as_run": native})
    if difference > allowed:
        run(case)
    findings = case.findings(latent=latent)
    # Every part is the same function, so the whole is: what is left has grown from the rounding of constants.
    grown = 1e-4 if rounding is None else 8 * torch.finfo(rounding).eps
    if not findings and difference <= grown:
        return Diagnosis(first.subject, second.subject, "noise", (), evidence)
    if not findings:
        place = case.place("whole model", a.graph.output, b.graph.output)
        case.add("unexplained", place, "gives one result", "gives another", b.graph.output)
        findings = case.findings(latent=latent)
    return Diagnosis(first.subject, second.subject, "differs", tuple(findings), evidence)


def run(case: Case) -> None:
    """Every part of both models."""
    a, b = case.a.structure, case.b.structure
    sites, inners = pairs(a.sites, b.sites), pairs(a.inners, b.inners)
    for x, y in sites:
        weights.check_site(case, x, y)
    for x, y in inners:
        weights.check_inner(case, x, y)
    for x, y in pairs(a.experts, b.experts):
        weights.check_inner(case, x, y)
        feed_forward.check_expert(case, x, y)
    _unpaired(case)
    others_a, others_b = _others(case.a), _others(case.b)
    for x, y in zip(others_a, others_b, strict=False):
        weights.check_other(case, x, y, last=y is others_b[-1])
    ends = case.a.graph.output, case.b.graph.output
    _guarded(case, "stream", ends, lambda: stream.check(case))
    for x, y in sites:
        _guarded(case, "attention", (x.scores, y.scores), partial(attention.check, case, x, y))
    for x, y in inners:
        _guarded(case, "feed-forward", (x.out.node, y.out.node), partial(feed_forward.check, case, x, y))
    _guarded(case, "result", ends, lambda: ending.check(case))
    masks = {r.place.layer for r in case.raw if r.kind in _MASKS}
    # Rows without anything to read are what such a mask leaves.
    case.raw = [r for r in case.raw if r.kind != "masked-row-nan" or r.place.layer not in masks]


def _beyond(case: Case) -> None:
    """Activations that part only on larger numbers than these inputs give."""
    for x, y in pairs(case.a.structure.inners, case.b.structure.inners):
        count = len(case.raw)
        weights.check_inner(case, x, y)
        if len(case.raw) == count:
            feed_forward.check(case, x, y)
    case.raw = [r for r in case.raw if r.kind in ("activation", "gate-order", "norm-eps")]


def _guarded(case: Case, part: str, nodes: tuple[int, int], check: Callable[[], None]) -> None:
    """A part that cannot be run on the other model's values is unexplained; the others are said."""
    try:
        check()
    except (RuntimeError, IndexError) as error:
        words = "runs on these values", "cannot be run on them"
        case.add("unexplained", case.place(part, *nodes), *words, nodes[1], error=str(error))


def _unpaired(case: Case) -> None:
    """The first part that only one of the models has."""
    a, b = case.a.structure, case.b.structure
    lost = [*alone(a.sites, b.sites), *alone(a.inners, b.inners)]
    more = [*alone(b.sites, a.sites), *alone(b.inners, a.inners)]
    # Without a residual sum between them, maps look as if they belonged to one feed-forward network.
    lost = [x for x in lost if isinstance(x, Site) or x.out not in _inputs(a)]
    more = [x for x in more if isinstance(x, Site) or x.out not in _inputs(b)]
    if not lost and not more:
        return
    first = min(lost or more, key=lambda x: x.out.node if x.out is not None else 0)
    node = first.out.node if first.out is not None else 0
    same = case.b.sources_at(case.a.sources.get(first.out.out)) if lost and first.out is not None else None
    ends = case.a.graph.output, case.b.graph.output
    here, there = (node, ends[1] if same is None else same) if lost else (ends[0], node)
    part = "feed-forward"
    if isinstance(first, Site):
        part = "cross-attention" if first.cross else "self-attention"
    words = [f"has {len(s.sites)} attentions and {len(s.inners)} feed-forward networks" for s in (a, b)]
    if same is not None:
        words = [f"computes this as {part} does", "computes it in a way of its own"]
    case.add("unexplained", case.place(part, here, there), words[0], words[1], there)
    case.torn = True


def _inputs(structure: Structure) -> set[Linear]:
    """Maps that something is made of right away: queries, keys, values, what is between two maps."""
    found = {part.linear for site in structure.sites for _, part in site.parts()}
    return found | {linear for inner in structure.inners for linear in inner.sources}


def _others(model: Model) -> list[Any]:
    taken = {s.out for s in model.structure.sites} | {i.out for i in model.structure.inners}
    taken |= {p.linear for s in model.structure.sites for _, p in s.parts()}
    taken |= {linear for i in model.structure.inners for linear in i.sources}
    return [n for n in model.structure.linears if n not in taken]


def result(model: Model) -> Tensor:
    """The result, ``[B, T, …]``."""
    value = model.graph.values[model.graph.output]
    found = model.of_node(model.graph.output)
    return value if found is None else found


def _allowance(model: Model, unit: float) -> float:
    """How far the result moves when every constant moves by one unit in the last place.

    Constants and buffers are made in float32 in most code: two implementations that differ in nothing but the
    order of that arithmetic differ by this much.
    """
    generator = torch.Generator().manual_seed(11)
    graph = model.graph
    moved: dict[int, Tensor] = {}
    for number in sorted(graph.useful):
        node = graph.nodes[number]
        made = graph.static[number] and not any(graph.static[n] for n in graph.args(number))
        if not node.value.is_floating_point() or not made or _of_weights(model, number):
            continue
        value = graph.values[number]
        noise = torch.rand(value.shape, generator=generator, dtype=torch.float64) * 2 - 1
        # Whole numbers are exact everywhere; masks are made of them and of the largest numbers.
        exact = ~value.isfinite() | (value == value.round()) | (value.abs() > 1e9)
        moved[number] = torch.where(exact, value, value * (1 + noise * unit))
    if not moved:
        return 1e-7
    out = graph.evaluate(graph.output, moved)
    return max(1e-7, 4 * gap(graph.values[graph.output].nan_to_num(), out.nan_to_num()))


def _of_weights(model: Model, number: int) -> bool:
    """Whether a node reads a trained parameter; a buffer is a constant."""
    trained = model.recording.trained
    return any(r.kind == "parameter" and r.name in trained for r in model.graph.nodes[number].refs())


def _native(first: Recording, second: Recording, a: Model, b: Model, role: str) -> float:
    """The difference of the results as the models ran, in their own precision."""
    ours, theirs = (
        m.graph.canonical(r.result().double(), m.width(m.graph.output), m.graph.output)
        for r, m in ((first, a), (second, b))
    )
    if ours is None or theirs is None:
        return gap(first.result().double(), second.result().double())
    return Case(a, b).differ(ours, theirs, role)


def _rounding(first: Recording, second: Recording) -> torch.dtype | None:
    """The coarser of two dtypes that parameters are kept in, where they differ."""
    kinds = [r.dtype for r in (first, second)]
    if kinds[0] == kinds[1] or None in kinds:
        return None
    return max((k for k in kinds if k is not None), key=lambda k: torch.finfo(k).eps)


def _constants(recording: Recording) -> torch.dtype | None:
    """The half precision that constants are kept in, where they are: buffers turned with the module."""
    for name, value in recording.parameters.items():
        half = value.is_floating_point() and torch.finfo(value.dtype).bits < 32
        if half and name not in recording.trained and bool((value != value.round()).any()):
            return value.dtype
    return None
