"""`isoform show` on a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from isoform.report.terminal import grid, heading, indented, number, table


def words(console: Console, lines: Sequence[str]) -> None:
    """The description: a summary, then a line for each component."""
    console.print(Text(lines[0], style="bold"))
    parts = Table.grid(padding=(0, 2))
    for line in lines[1:]:
        part, _, rest = line.partition(": ")
        parts.add_row(Text(part, style="cyan"), Text(rest))
    console.print(indented(parts))


def visibility(console: Console, grids: Iterable[Mapping[str, Any]]) -> None:
    """Who may read whom, side by side. Each: stack, reads, layers, rule, prefix, window, allowed."""
    console.print(heading("Who may read whom", "queries downwards, keys across; ■ may be read, · may not"))
    shown: list[Group] = []
    for one in grids:
        what = "the source" if one["reads"] == "source" else one["rule"]
        if one["prefix"] is not None:
            what += f", condition of {one['prefix']}"
        if one["window"] is not None:
            what += f", window {one['window']:,}"
        caption = Text.assemble((f"{one['stack']} ", "cyan"), what)
        shown.append(
            Group(caption, Text(f"layers {_ranges(one['layers'])}", style="dim"), grid(one["allowed"]))
        )
    console.print(indented(Columns(shown, padding=(0, 4))))


def shapes(console: Console, rows: Iterable[tuple[str, str, str, str]], sizes: str) -> None:
    """The table of shapes (R25).

    Args:
        console: where.
        rows: operation, shapes it reads, shapes of its parameters, shape it leaves.
        sizes: what B, T and S are.
    """
    console.print(heading("Shapes", f"read off the modules; {sizes}; weights as they are stored, [out, in]"))
    cells: list[Sequence[object]] = []
    above = ""
    for operation, *rest in rows:
        found = re.match(r"\w+\.layers\.[^.]+", operation)
        block = found[0] if found else ""
        if block and block != above:
            cells.append([Text(block.replace("layers.", "layers "), style="cyan"), "", "", ""])
        above = block
        name = f"  {operation.removeprefix(block)[1:]}" if block else operation
        cells.append([name, *rest])
    console.print(indented(table(["operation", "reads", "parameters", "leaves"], cells)))


def parameters(console: Console, counts: Mapping[str, Any], *, agree: bool, depth: int = 3) -> None:
    """Parameters per component, in closed form and as counted from the modules (R26).

    Args:
        console: where.
        counts: ``components`` (path, formula, sizes, repeat, each, total, counted, shared_with), ``total``,
            ``counted``.
        agree: whether closed form and modules agree.
        depth: how deep in the tree to go.
    """
    console.print(
        heading("Parameters", "closed form of one occurrence, times its occurrences; shared ones count once")
    )
    rows: list[Sequence[object]] = []
    for part in counts["components"]:
        steps = part["path"].replace("layers.", "layers ").split(".")
        if len(steps) > depth:
            continue
        shared = part["shared_with"] or (part["formula"] == "0" and "a shared tensor")
        form = f"that of {shared}" if part["shared_with"] else shared or part["formula"]
        repeat = part["repeat"] if part["repeat"] != 1 else ""
        wrong = part["counted"] is not None and part["counted"] != part["total"]
        counted = Text(number(part["counted"]), style="bold red" if wrong else "")
        name = "  " * (len(steps) - 1) + steps[-1]
        rows.append([name, form or "", repeat, part["each"] if repeat else "", part["total"], counted])
    rows.append(["all", "", "", "", counts["total"], counts["counted"]])
    columns = ["component", "closed form", "×", "each", "total", "counted"]
    console.print(indented(table(columns, rows, right=(2, 3, 4, 5), total=True)))
    sizes: dict[str, list[int]] = {}
    for part in counts["components"]:
        for symbol, size in part["sizes"].items():
            if size not in sizes.setdefault(symbol, []):
                sizes[symbol].append(size)
    console.print(
        indented(
            Text(
                ", ".join(f"{s} = {' or '.join(f'{n:,}' for n in all_)}" for s, all_ in sizes.items()),
                style="dim",
            )
        )
    )
    if agree:
        console.print("  Closed form and modules agree, in every component.", style="green")
    else:
        console.print("  Closed form and modules disagree.", style="bold red")


def ties(console: Console, groups: Sequence[Sequence[str]]) -> None:
    """Which parameters are one tensor (6.36)."""
    console.print(heading("Shared tensors"))
    if not groups:
        console.print("  none")
    for names in groups:
        console.print(indented(Text(" = ".join(names))))


def differences(console: Console, first: str, second: str, sentences: Sequence[str]) -> None:
    """What separates two configurations."""
    console.print(Text.assemble(("first   ", "dim"), first, ("\nsecond  ", "dim"), second))
    console.print(heading("What differs"))
    if not sentences:
        console.print("  nothing: the two configurations are the same function of their weights")
    listed = Table.grid(padding=(0, 1))
    for sentence in sentences:
        listed.add_row("·", Text(sentence))
    console.print(indented(listed))


def _ranges(numbers: Sequence[int]) -> str:
    """``0–3, 6`` for 0, 1, 2, 3, 6."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)
