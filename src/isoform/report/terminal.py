"""Tables, matrices and grids on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

Align = Literal["left", "right", "center"]
ABSENT = "–"


def console(*, error: bool = False) -> Console:
    """The terminal, or plain text of a steady width where there is none."""
    stream = sys.stderr if error else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else 120, highlight=False, soft_wrap=False)


def heading(text: str, note: str = "") -> RenderableType:
    """A line that opens a part, and what is said of it."""
    line = Text(text, style="bold")
    return Group(Text(), line, Text(note, style="dim")) if note else Group(Text(), line)


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str | None = None,
    right: Iterable[int] | Literal["numbers"] = "numbers",
    total: bool = False,
) -> Table:
    """A table without vertical rules.

    Args:
        columns: the headings.
        rows: cells; numbers get thousands separators, None becomes a dash.
        title: a line above it.
        right: which columns are flush right; "numbers": those that hold nothing but numbers.
        total: whether the last row is a sum, set off by a rule.
    """
    cells = [list(row) for row in rows]
    if right == "numbers":
        right = [
            i
            for i in range(len(columns))
            if cells and all(row[i] is None or isinstance(row[i], int | float) for row in cells)
        ]
    flush = set(right)
    result = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        show_edge=False,
    )
    for i, name in enumerate(columns):
        result.add_column(name, justify="right" if i in flush else "left", overflow="fold")
    for n, row in enumerate(cells):
        if total and n == len(cells) - 1:
            result.add_section()
        result.add_row(*(cell if isinstance(cell, Text) else Text(number(cell)) for cell in row))
    return result


def number(value: object, digits: int = 4) -> str:
    """A cell: integers with thousands separators, other numbers to some digits, None a dash."""
    if value is None:
        return ABSENT
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}g}"


def matrix(values: Sequence[Sequence[float]], *, digits: int = 6) -> Text:
    """A matrix in brackets, columns aligned; what rounds to zero is shown as 0."""
    cells = [[_entry(value, digits) for value in row] for row in values]
    widths = [max(len(row[j]) for row in cells) for j in range(len(cells[0]))]
    lines = [" ".join(cell.rjust(w + 1) for cell, w in zip(row, widths, strict=True)) + " " for row in cells]
    if len(lines) == 1:
        return Text(f"[{lines[0]}]")
    left = ["⎡", *["⎢"] * (len(lines) - 2), "⎣"]
    right = ["⎤", *["⎥"] * (len(lines) - 2), "⎦"]
    return Text("\n".join(a + line + b for a, line, b in zip(left, lines, right, strict=True)))


def grid(
    allowed: Sequence[Sequence[bool]],
    *,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
) -> Text:
    """A visibility matrix: queries downwards, keys across, ■ may be read, · may not."""
    across = keys or [str(j) for j in range(len(allowed[0]))]
    down = queries or [str(i) for i in range(len(allowed))]
    margin, width = max(map(cell_len, down)), max(map(cell_len, across))
    text = Text(" " * (margin + 1) + " ".join(_flush_right(name, width) for name in across), style="dim")
    for name, row in zip(down, allowed, strict=True):
        text.append("\n" + _flush_right(name, margin), style="dim")
        for may in row:
            text.append(" " + _flush_right("■" if may else "·", width), style="bold cyan" if may else "dim")
    return text


def indented(body: RenderableType, by: int = 2) -> Padding:
    """Moved to the right."""
    return Padding(body, (0, 0, 0, by), expand=False)


def verdict(passed: bool | None) -> Text:
    """How a check came out, in a word and a colour."""
    if passed is None:
        return Text("not checked", style="yellow")
    return Text("holds", style="green") if passed else Text("fails", style="bold red")


def visible(token: str) -> str:
    """A token on one line: spaces and control characters written out."""
    return "".join("␣" if char == " " else char if char.isprintable() else repr(char)[1:-1] for char in token)


def _entry(value: float, digits: int) -> str:
    text = f"{value:.{digits}f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def _flush_right(text: str, width: int) -> str:
    """Padded to a width in terminal cells: a CJK character takes two, a combining mark none."""
    return " " * (width - cell_len(text)) + text
