"""What a diagnosis says."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

Verdict = Literal["equivalent", "noise", "differs"]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where in both models.

    Args:
        part: what it is, e.g. ``"self-attention"``.
        layer: number of the layer in its stack; None outside of layers.
        reference: module path in the reference.
        candidate: module path in the candidate.
        reference_source: file and line that ran there.
        candidate_source: likewise.
    """

    part: str
    layer: int | None
    reference: str
    candidate: str
    reference_source: str
    candidate_source: str

    def __str__(self) -> str:
        layer = "" if self.layer is None else f"layer {self.layer}, "
        sides = [
            f"{side} {path or '(top)'}" + (f" ({source})" if source else "")
            for side, path, source in (
                ("reference", self.reference, self.reference_source),
                ("candidate", self.candidate, self.candidate_source),
            )
        ]
        return f"{layer}{self.part}: {', '.join(sides)}"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One cause.

    Args:
        kind: a slug of the list of deviations, or ``"unexplained"``.
        where: all its places, in order of execution.
        statement: how each of the two behaves; either can be the wrong one.
        evidence: figures.
        hint: what to look at.
        latent: it does not show on the inputs and weights as given, only with others.
    """

    kind: str
    where: tuple[Place, ...]
    statement: str
    evidence: dict[str, Any]
    hint: str
    latent: bool = False

    def __str__(self) -> str:
        first = self.where[0] if self.where else ""
        more = f" and {len(self.where) - 1} more" if len(self.where) > 1 else ""
        latent = " (latent)" if self.latent else ""
        return f"{self.kind}{latent}: {self.statement}\n    at {first}{more}\n    {self.hint}"


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Whether two models are the same function, and if not, every reason.

    Args:
        reference: class of the reference.
        candidate: class of the candidate.
        verdict: "equivalent"; "noise" where only rounding differs; "differs".
        findings: in order of execution.
        evidence: figures about the whole: relative difference of the results, what rounding explains.
        notes: what could not be looked at, and why.
    """

    reference: str
    candidate: str
    verdict: Verdict
    findings: tuple[Finding, ...]
    evidence: dict[str, Any]
    notes: tuple[str, ...] = ()

    def kinds(self) -> tuple[str, ...]:
        """The slugs, each once, in order."""
        return tuple(dict.fromkeys(f.kind for f in self.findings))

    def to_dict(self) -> dict[str, Any]:
        """Plain data with stable keys."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        head = f"{self.reference} and {self.candidate}: {self.verdict}"
        return "\n".join([head, *(f"  {f}" for f in self.findings), *(f"  note: {n}" for n in self.notes)])

    def _repr_html_(self) -> str:
        from html import escape

        rows = "".join(
            f"<tr><td><code>{f.kind}</code>{' (latent)' if f.latent else ''}</td>"
            f"<td>{escape(f.statement)}</td>"
            f"<td>{'<br>'.join(escape(str(p)) for p in f.where)}</td><td>{escape(f.hint)}</td></tr>"
            for f in self.findings
        )
        caption = escape(f"{self.reference} and {self.candidate}: {self.verdict}")
        return f"<table><caption>{caption}</caption>{rows}</table>"
