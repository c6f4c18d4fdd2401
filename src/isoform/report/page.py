"""Reports as one HTML file that needs no network: style, tables and pictures are inside it."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, NewType

from isoform.config.files import write_text
from isoform.report.terminal import number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Block = NewType("Block", str)
"""A piece of HTML, escaped where it has to be."""


class Page:
    """A page that is built from above to below, then written.

    Args:
        title: its heading and the window's title.
        lead: one or two sentences below it.
        footer: a line at the end: what made the page, and how to make it again.
    """

    def __init__(self, title: str, *, lead: str = "", footer: str = "") -> None:
        self.title = title
        self.lead = lead
        self.footer = footer
        self._sections: list[tuple[str, list[Block]]] = []

    def section(self, title: str, *blocks: Block) -> None:
        """Add a section."""
        self._sections.append((title, list(blocks)))

    def render(self) -> str:
        """The page as HTML."""
        links = "".join(f'<a href="#s{i}">{_text(title)}</a>' for i, (title, _) in enumerate(self._sections))
        navigation = f"<nav>{links}</nav>" if len(self._sections) > 2 else ""
        body = "\n".join(
            f'<section>\n<h2 id="s{i}">{_text(title)}</h2>\n' + "\n".join(blocks) + "\n</section>"
            for i, (title, blocks) in enumerate(self._sections)
        )
        style = resources.files("isoform.report").joinpath("page.css").read_text(encoding="utf-8")
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{_text(self.title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
            f"<header>\n<h1>{_text(self.title)}</h1>\n"
            f'<p class="lead">{_text(self.lead)}</p>\n{navigation}</header>\n'
            f"{body}\n<footer>{_text(self.footer)}</footer>\n</body>\n</html>\n"
        )

    def write(self, path: str | Path) -> None:
        """Write the page whole or not at all."""
        write_text(path, self.render())


def paragraph(text: str, *, note: bool = False) -> Block:
    """A paragraph of plain text; a note is in a softer colour."""
    return Block(f'<p class="note">{_text(text)}</p>' if note else f"<p>{_text(text)}</p>")


def facts(values: Mapping[str, object]) -> Block:
    """The few figures that matter, large: what it is, and its value."""
    cells = (
        f"<div><b>{_text(number(value))}</b><span>{_text(name)}</span></div>"
        for name, value in values.items()
    )
    return Block(f'<div class="facts">{"".join(cells)}</div>')


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, total: bool = False) -> Block:
    """A table: numbers flush right, None a dash, `Markup` as it stands; the last row may be a sum."""
    cells = [list(row) for row in rows]
    right = {
        i
        for i in range(len(columns))
        if cells and all(row[i] is None or isinstance(row[i], int | float) for row in cells)
    }
    head = "".join(f"<th{_numeric(i in right)}>{_text(name)}</th>" for i, name in enumerate(columns))
    body: list[str] = []
    for n, row in enumerate(cells):
        kind = ' class="total"' if total and n == len(cells) - 1 else ""
        filled = "".join(f"<td{_numeric(i in right)}>{_cell(cell)}</td>" for i, cell in enumerate(row))
        body.append(f"<tr{kind}>{filled}</tr>")
    return Block(
        f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n'
        + "\n".join(body)
        + "\n</tbody>\n</table></div>"
    )


def checks(rows: Iterable[tuple[str, bool | None, str]]) -> Block:
    """Checks: name, whether it holds (None: not checked), and the statement or evidence."""
    return table(
        ["check", "", "what was seen"], [(name, verdict(passed), said) for name, passed, said in rows]
    )


class Markup(str):
    """HTML within a table cell, which is not escaped again."""


def verdict(passed: bool | None) -> Markup:
    """How a check came out, in a word and a colour."""
    word, kind = {True: ("holds", "holds"), False: ("fails", "fails"), None: ("not checked", "open")}[passed]
    return Markup(f'<span class="{kind}">{word}</span>')


def code(text: str) -> Block:
    """Text as it stands: a grid, a command, a matrix."""
    return Block(f"<pre>{_text(text)}</pre>")


def picture(figure: Figure | bytes, *, caption: str, alt: str = "") -> Block:
    """A figure, or the bytes of a PNG, inside the page.

    Args:
        figure: what to show.
        caption: the line below it.
        alt: what it shows, for those who cannot see it; default: the caption.
    """
    if not isinstance(figure, bytes):
        from isoform.report.figures import render

        figure = render(figure, "png")
    data = base64.b64encode(figure).decode("ascii")
    words = html.escape(alt or caption, quote=True)
    return Block(
        f'<figure><img alt="{words}" src="data:image/png;base64,{data}">'
        f"<figcaption>{_text(caption)}</figcaption></figure>"
    )


def _cell(value: object) -> str:
    return value if isinstance(value, Markup) else _text(number(value))


def _text(text: str) -> str:
    return html.escape(text, quote=False)


def _numeric(right: bool) -> str:
    return ' class="number"' if right else ""
