"""What an audit says."""

from __future__ import annotations

import dataclasses
from typing import Any

NAMES = (
    "causality",
    "prefix",
    "padding-left",
    "padding-right",
    "documents",
    "window",
    "cross-padding",
    "batch-independence",
    "cache",
    "decode-protocol",
    "eval-determinism",
    "train-dropout",
    "paths",
    "masked-rows",
    "normalisation",
    "ties",
    "reload",
    "loss-shift",
    "loss-average",
)


@dataclasses.dataclass(frozen=True)
class Check:
    """One promise and whether it is kept.

    Args:
        name: a stable name.
        passed: True, False, or None when it could not be run on this model.
        statement: what was found, in one sentence; for None the reason.
        evidence: the figures: sizes, tolerances, the places concerned.
        shows: what a pass of this check does show.
        does_not_show: what it leaves open.
    """

    name: str
    passed: bool | None
    statement: str
    evidence: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    shows: str = ""
    does_not_show: str = ""


@dataclasses.dataclass(frozen=True)
class AuditReport:
    """All checks of one model."""

    subject: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """No check that could be run failed."""
        return all(check.passed is not False for check in self.checks)

    def __getitem__(self, name: str) -> Check:
        return next(check for check in self.checks if check.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Plain data with stable keys."""
        return {
            "subject": self.subject,
            "passed": self.passed,
            "checks": [dataclasses.asdict(check) for check in self.checks],
        }

    def __str__(self) -> str:
        mark = {True: "pass", False: "FAIL", None: "not checked"}
        return "\n".join(f"{mark[c.passed]:>11}  {c.name}: {c.statement}" for c in self.checks)

    def _repr_html_(self) -> str:
        from html import escape

        mark = {True: "✓", False: "✗", None: "–"}
        rows = "".join(
            f"<tr><td>{mark[c.passed]}</td><td><code>{c.name}</code></td><td>{escape(c.statement)}</td></tr>"
            for c in self.checks
        )
        return f"<table><caption>Audit of {escape(self.subject)}</caption>{rows}</table>"


def one_line(error: BaseException) -> str:
    """What an error says, on one line."""
    return " ".join(str(error).split())[:160]
