"""The figures as a Markdown page and a picture."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

from pydantic import TypeAdapter

from benchmarks.timing import Row, Section
from isoform.config.files import write_bytes, write_text

ORDER = (
    "Decoding", "Translation", "Training steps", "Token buckets", "Loading", "Memory", "Audit and compare",
    "Growth", "Start-up",
)  # fmt: skip
"""Of sections, by the beginnings of their titles; others come last."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """A section, and how it came about.

    Args:
        section: the figures.
        by: the command.
        on: machine, libraries, measured limits.
    """

    section: Section
    by: str
    on: str


_ALL = TypeAdapter(list[Measured])


def write(folder: Path, command: str, on: str, sections: list[Section]) -> None:
    """``results.md`` and ``results.png`` of these sections and of those in ``results.json`` that are not
    among them, which then holds all."""
    kept = folder / "results.json"
    held = {m.section.title: m for m in _read(kept)} | {s.title: Measured(s, command, on) for s in sections}
    found = sorted(held.values(), key=_place)
    parts = [
        "# Benchmarks",
        "Implementations of a case run in turns in the same minutes and under the same settings "
        "(`benchmarks/environment.py`); figures are medians. ×: how many times as fast as the first row of "
        "the case. Each section was measured by the command and on the machine that it names.",
        "![Times as fast as the first implementation of each case](results.png)",
    ]
    parts += [_section(m) for m in found]
    write_bytes(kept, _ALL.dump_json(found, indent=1) + b"\n")
    write_text(folder / "results.md", "\n\n".join(parts) + "\n")
    write_bytes(folder / "results.png", _picture([m.section for m in found]))


def _read(path: Path) -> list[Measured]:
    return _ALL.validate_json(path.read_bytes()) if path.is_file() else []


def _place(measured: Measured) -> int:
    title = measured.section.title
    return next((i for i, name in enumerate(ORDER) if title.startswith(name)), len(ORDER))


def _section(measured: Measured) -> str:
    section = measured.section
    lines = [f"## {section.title}", "", f"`{measured.by}`: {measured.on}", ""]
    if section.text:
        lines += [section.text, ""]
    lines += [
        f"| case | implementation | ms | {section.unit} | × | of the limit | outputs |",
        "|" + "---|" * 7,
    ]
    for case, held in _cases(section.rows).items():
        for row in held:
            said = ", ".join(x for x in (row.equal, row.note) if x)
            limit = "" if row.limit is None else f"{row.limit:.0%}"
            cells = [
                case,
                row.who,
                f"{row.seconds * 1e3:.4g}",
                f"{row.rate:.4g}",
                _times(row, held[0]),
                limit,
                said,
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cases(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows by case, each case where it first occurs."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.case, []).append(row)
    return found


def _times(row: Row, first: Row) -> str:
    return f"{row.rate / first.rate:.2f}"


def _picture(sections: list[Section]) -> bytes:
    import io

    from matplotlib.figure import Figure

    cases = [
        found for section in sections if section.title != "Growth" for found in _cases(section.rows).items()
    ]
    grown = [row for section in sections if section.title == "Growth" for row in section.rows]
    height = sum(len(rows) + 1 for _, rows in cases)
    figure = Figure(figsize=(11, 1 + 0.22 * height + (3 if grown else 0)), layout="constrained")
    ratios = [max(height * 0.22, 1), 3] if grown else [1]
    axes = figure.subplots(len(ratios), 1, height_ratios=ratios, squeeze=False)[:, 0]
    place, ticks, names = 0, [], []
    for case, rows in cases:
        for row in rows:
            times = row.rate / rows[0].rate
            ours = row.who.startswith(("isoform", "import isoform", "token"))
            axes[0].barh(place, times, color="#2a6f97" if ours else "#b0b0b0")
            axes[0].text(times, place, f" {times:.2f}", va="center", fontsize=7)
            ticks.append(place)
            names.append(f"{case}: {row.who}")
            place += 1
        place += 1
    axes[0].set_yticks(ticks, names, fontsize=7)
    axes[0].invert_yaxis()
    axes[0].axvline(1, color="black", linewidth=0.6)
    axes[0].set_xlabel("times as fast as the first implementation of the case")
    if grown:
        for kind, rows in itertools.groupby(grown, key=lambda row: row.who.split()[0]):
            held = list(rows)
            sizes = [int(row.who.split()[1]) for row in held]
            axes[1].plot(sizes, [row.seconds * 1e3 for row in held], marker="o", label=kind)
        axes[1].set_xscale("log", base=2)
        axes[1].set_xlabel("size")
        axes[1].set_ylabel("ms a step")
        axes[1].set_ylim(bottom=0)
        axes[1].legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=110)
    return buffer.getvalue()
