"""Many tensors that are not the checkpoint's: a layer in place of another, or nothing loaded: one cause."""

from __future__ import annotations

from collections.abc import Sequence

from isoform.verify.diagnose.case import HINTS, Case, Raw

MANY = 3
"""From so many on they have one cause, fewer are named one by one."""


def join(case: Case) -> None:
    """Say in the same words what has one cause."""
    lost = [raw for raw in case.raw if raw.kind == "tie-lost"]
    elsewhere = [raw for raw in lost if _found(raw)]
    for layer in {raw.place.layer for raw in elsewhere}:
        own = [raw for raw in elsewhere if raw.place.layer == layer]
        if layer is not None and len(own) >= MANY:
            hint = "these tensors are another layer's: check which layer is loaded here, or run"
            _say(own, "uses this layer's tensors", "uses others of its checkpoint", hint)
    nowhere = [raw for raw in lost if not _found(raw)]
    if len(nowhere) >= MANY:
        _say(
            nowhere,
            "uses its checkpoint's tensors here",
            "uses tensors that are not in it",
            HINTS["tie-lost"],
        )


def _found(raw: Raw) -> bool:
    found = raw.evidence.get("found")
    return None not in found.values() if isinstance(found, dict) else found is not None


def _say(raws: Sequence[Raw], reference: str, candidate: str, hint: str) -> None:
    for raw in raws:
        raw.evidence = {"reference": raw.reference, "candidate": raw.candidate, **raw.evidence}
        raw.reference, raw.candidate, raw.hint = reference, candidate, hint
