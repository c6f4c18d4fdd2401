"""Audits, comparisons and diagnoses as one-file HTML pages."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from isoform.report import page

if TYPE_CHECKING:
    from isoform.verify.audit import AuditReport
    from isoform.verify.comparison import Comparison
    from isoform.verify.diagnose import Diagnosis


def audit_page(report: AuditReport, *, command: str) -> page.Page:
    """What an audit found, what each check shows and what it does not."""
    out = page.Page(f"Audit of {report.subject}", lead=_holds(report.passed), footer=f"Made by: {command}")
    out.section("Checks", page.checks((c.name, c.passed, c.statement) for c in report.checks))
    rows = [(c.name, c.shows, c.does_not_show) for c in report.checks]
    out.section("What a pass shows", page.table(["check", "shows", "leaves open"], rows))
    return out


def comparison_page(found: Comparison, *, command: str) -> page.Page:
    """Divergence along depth, and the profile of where it begins."""
    out = page.Page(
        f"{found.reference} and {found.candidate}",
        lead=f"Verdict: {found.verdict}.",
        footer=f"Made by: {command}",
    )
    _divergence(out, found)
    out.section("Again", page.code(command))
    return out


def diagnosis_page(found: Diagnosis, comparison: Comparison, *, command: str) -> page.Page:
    """The causes by name, then where and how the models part."""
    out = page.Page(
        f"{found.reference} and {found.candidate}",
        lead=f"Verdict: {found.verdict}.",
        footer=f"Made by: {command}",
    )
    rows = [
        (f.kind + (" (latent)" if f.latent else ""), f.statement, "; ".join(map(str, f.where)), f.hint)
        for f in found.findings
    ]
    if rows:
        out.section("Causes", page.table(["kind", "how they behave", "where", "what to look at"], rows))
    else:
        out.section("Causes", page.paragraph("None: both compute the same function up to rounding."))
    _divergence(out, comparison)
    for note in found.notes:
        out.section("Note", page.paragraph(note, note=True))
    out.section("Again", page.code(command))
    return out


def _divergence(out: page.Page, found: Comparison) -> None:
    from isoform.report import figures

    rows = [r for r in found.rows if r.name != "gradient"]
    if rows:
        places = [float(i) for i in range(len(rows))]
        series = {
            "difference": (places, [_log(r.error) for r in rows]),
            "rounding": (places, [_log(r.expected) for r in rows]),
        }
        figure = figures.curves(
            series,
            title="Divergence along depth",
            x_axis="activation, in order",
            y_axis="log10 of the relative difference",
        )
        out.section(
            "Divergence along depth",
            page.picture(figure, caption="Above the line of rounding, the models part."),
        )
    for name, values in found.profiles.items():
        shown = values[:64]
        figure = figures.heat_map(
            [[float(v) for v in shown]],
            rows=[""],
            columns=[str(i) for i in range(len(shown))],
            title=f"First divergence by {name}",
            row_axis="",
            column_axis=name,
        )
        out.section(f"By {name}", page.picture(figure, caption=f"Relative difference by {name}."))
    table = [
        (
            "≠" if r.differs else "",
            r.layer,
            r.name,
            r.reference,
            r.candidate,
            f"{r.error:.2e}",
            f"{r.expected:.0e}",
        )
        for r in found.rows
    ]
    columns = ["", "layer", "activation", "reference", "candidate", "difference", "rounding"]
    out.section("All aligned activations", page.table(columns, table))


def _log(value: float) -> float:
    return math.log10(min(max(value, 1e-18), 1e6))


def _holds(passed: bool) -> str:
    return "Every check that could be run holds." if passed else "At least one check does not hold."
