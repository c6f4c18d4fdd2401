"""The figures as a Markdown page and a picture."""

from __future__ import annotations

import itertools
from pathlib import Path

from benchmarks.timing import Row, Section
from isoform.config.files import write_bytes, write_text


def write(folder: Path, command: str, environment: str, machine: str, sections: list[Section]) -> None:
    """``results.md`` and ``results.png``."""
    parts = [
        "# Benchmarks",
        f"Written by `{command}`. Implementations of a case run in turns in the same minutes and "
        "under the same settings (`benchmarks/environment.py`); figures are medians. ×: how many times as "
        "fast as the first row of the case.",
        environment,
        machine,
        "![Times as fast as the first implementation of each case](results.png)",
    ]
    parts += [_section(section) for section in sections]
    write_text(folder / "results.md", "\n\n".join(parts) + "\n")
    write_bytes(folder / "results.png", _picture(sections))


def _section(section: Section) -> str:
    lines = [f"## {section.title}", ""]
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
