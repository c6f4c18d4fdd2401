"""Steps with a cache against the full pass, in both models: positions, masks and cached contents (R32).

Where one model's steps equal its full pass and the other's do not, a step of each is recorded and compared
like two models of one position, with the past as a constant.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from isoform.errors import IsoformError
from isoform.verify.align import Model
from isoform.verify.diagnose.case import HINTS
from isoform.verify.diagnose.report import Diagnosis, Finding, Place
from isoform.verify.noise import tolerance
from isoform.verify.record import record
from isoform.verify.stepping import Step, Stepper, stepper
from isoform.verify.subject import Inputs, Subject, mode

_POSITIONS = frozenset(
    (
        "alibi-slope",
        "position-offset",
        "position-padding",
        "relative-bias",
        "rope-axis",
        "rope-frequency",
        "rope-partial",
        "sinusoid-layout",
    )
)
_MASKS = frozenset(("causality", "causal-alignment", "sliding-window", "mask-polarity"))

Examine = Callable[[Model, Model], Diagnosis]


@dataclasses.dataclass(eq=False)
class _Stepped:
    """One model's steps beside its full pass.

    Attributes:
        stepper: how it is stepped.
        step: the first position at which a single step differs from the full pass; None: all are equal.
        chunk: likewise for several positions at once; None also where it cannot be asked.
        size: the largest difference of a single step, relative to the largest result.
    """

    stepper: Stepper
    step: int | None
    chunk: int | None
    size: float


def check(
    first: nn.Module,
    second: nn.Module,
    inputs: Inputs,
    other: Inputs,
    steps: tuple[Step | None, Step | None],
    examine: Examine,
) -> list[Finding]:
    """Findings where one model's steps equal its full pass and the other's do not."""
    with mode(first, training=False), mode(second, training=False):
        one, two = _stepped(first, inputs, steps[0]), _stepped(second, other, steps[1])
        if one is None or two is None:
            return []
        if (one.step is None) != (two.step is None):
            return [_step_finding(one, two, examine)]
        if one.step is None and (one.chunk is None) != (two.chunk is None):
            words = [_said(x.chunk, "several positions at once") for x in (one, two)]
            return [_finding("causal-alignment", words, one, two, {})]
    return []


def _stepped(module: nn.Module, inputs: Inputs, step: Step | None) -> _Stepped | None:
    subject = Subject(module, inputs)
    found = stepper(subject, step)
    if found is None:
        return None
    try:
        full = subject.run().output
        real = subject.real(subject.target)
        single = found.run([1] * full.shape[1])
        part = full.shape[1] // 2
        chunked = found.run([part, full.shape[1] - part]) if found.chunks else None
    except (IsoformError, RuntimeError, ValueError, TypeError, AttributeError, IndexError):
        return None
    size = float((single - full).abs()[real].max() / full.abs().max().clamp(min=1e-30))
    return _Stepped(
        found, _first(single, full, real), None if chunked is None else _first(chunked, full, real), size
    )


def _first(stepped: Tensor, full: Tensor, real: Tensor) -> int | None:
    gap = (stepped - full).abs().flatten(2).amax(-1).masked_fill(~real, 0.0)
    wrong = ~(gap <= 8 * tolerance(full))
    return int(wrong.any(0).nonzero()[0]) if bool(wrong.any()) else None


def _said(place: int | None, how: str) -> str:
    if place is None:
        return f"gives with {how} what its full pass gives"
    return f"gives with {how} something else than its full pass, first at position {place}"


def _step_finding(one: _Stepped, two: _Stepped, examine: Examine) -> Finding:
    words = [_said(x.step, "cached steps") for x in (one, two)]
    wrong = one if one.step is not None else two
    evidence: dict[str, Any] = {"position": wrong.step, "relative_difference": wrong.size}
    at = max(int(wrong.step or 0), 1)
    try:
        a, b = (Model(record(*x.stepper.at(at))) for x in (one, two))
        found = examine(a, b)
    except (IsoformError, RuntimeError, ValueError, TypeError, AttributeError, IndexError):
        return _finding("unexplained", words, one, two, evidence)
    kinds = found.kinds()
    evidence["in_the_step"] = [f.statement for f in found.findings]
    where = found.findings[0].where if found.findings else ()
    if any(kind in _POSITIONS for kind in kinds) or any(p.part == "embedding" for p in where):
        return _finding("position-decode", words, one, two, evidence, where)
    if any(kind in _MASKS for kind in kinds):
        return _finding("causal-alignment", words, one, two, evidence, where)
    if kinds and all(p.part.endswith("attention") for f in found.findings for p in f.where):
        return _finding("cache-content", words, one, two, evidence, where)
    return _finding("unexplained", words, one, two, evidence, where)


def _finding(
    kind: str,
    words: list[str],
    one: _Stepped,
    two: _Stepped,
    evidence: dict[str, Any],
    where: tuple[Place, ...] = (),
) -> Finding:
    names = [type(x.stepper.subject.module).__name__ for x in (one, two)]
    place = where or (Place("cached step", None, names[0], names[1], "", ""),)
    statement = f"the reference {words[0]}, the candidate {words[1]}"
    return Finding(kind, place, statement, evidence, HINTS[kind])
