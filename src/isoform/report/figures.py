"""Figures. matplotlib is loaded when one is drawn, without a window and without its global state."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import textwrap
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from isoform.errors import DataError
from isoform.report.terminal import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#2b6cb0", "#d97706", "#15803d", "#b91c1c", "#7c3aed", "#0e7490", "#a16207", "#be185d")
SUFFIXES = (".png", ".svg", ".pdf")
READING_PATTERN = "a reading pattern, not an explanation"  # R36


def heat_map(
    values: Sequence[Sequence[float | None]],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    title: str,
    row_axis: str = "",
    column_axis: str = "",
    low: float | None = None,
    high: float | None = None,
    note: str = "",
    numbers: Literal["percent", "plain"] | None = None,
) -> Figure:
    """Numbers as colours, rows downwards.

    Args:
        values: ``[rows, columns]``; None leaves a cell blank.
        rows: their names, in any script.
        columns: likewise.
        title: above it.
        row_axis: what the rows are.
        column_axis: what the columns are.
        low: the palest value; None: the smallest one.
        high: the darkest value; None: the largest one.
        note: a line below it.
        numbers: whether the value is written into each cell, and how.
    """
    with _styled([title, note, row_axis, column_axis, *rows, *columns]) as write:
        figure, axes = _canvas(max(5.0, 2.2 + 0.34 * len(columns)), 1.8 + 0.34 * len(rows))
        cells = [[math.nan if value is None else value for value in row] for row in values]
        image = axes.imshow(cells, cmap="Blues", vmin=low, vmax=high, aspect="auto", interpolation="nearest")
        names = [write(name) for name in columns]
        if max(map(len, names), default=0) > 2:
            axes.set_xticks(range(len(names)), names, rotation=60, ha="right", rotation_mode="anchor")
        else:
            axes.set_xticks(range(len(names)), names)
        axes.set_yticks(range(len(rows)), [write(name) for name in rows])
        axes.set_xlabel(write(column_axis))
        axes.set_ylabel(write(row_axis))
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        if numbers is not None:
            middle = sum(image.get_clim()) / 2
            for i, row in enumerate(cells):
                for j, value in enumerate(row):
                    if math.isnan(value):
                        continue
                    text = f"{100 * value:.0f}" if numbers == "percent" else f"{value:.3g}"
                    colour = "white" if value > middle else "#1a202c"
                    axes.text(j, i, text, ha="center", va="center", fontsize=7, color=colour)
        bar = figure.colorbar(image, ax=axes, shrink=0.8)
        bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
        _titles(figure, axes, write(title), write(note))
        return figure


def attention_map(
    weights: Sequence[Sequence[float]], *, queries: Sequence[str], keys: Sequence[str], which: str
) -> Figure:
    """The weights of one head: who reads whom.

    Args:
        weights: ``[queries, keys]``, each row summing to one.
        queries: the tokens that read, downwards.
        keys: the tokens that are read, across.
        which: which stack, layer and head.
    """
    return heat_map(
        weights,
        rows=[visible(name) for name in queries],
        columns=[visible(name) for name in keys],
        title=f"Attention weights, {which}",
        row_axis="reads",
        column_axis="is read",
        low=0.0,
        high=1.0,
        note=READING_PATTERN,
    )


def curves(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    title: str,
    x_axis: str,
    y_axis: str,
    logarithmic: bool = False,
    note: str = "",
) -> Figure:
    """Lines over a common axis.

    Args:
        series: name to (x, y).
        title: above it.
        x_axis: what x is, with its unit.
        y_axis: what y is, with its unit.
        logarithmic: whether y is on a logarithmic scale.
        note: a line below it.
    """
    with _styled([title, x_axis, y_axis, note, *series]) as write:
        figure, axes = _canvas(7.0, 4.2)
        for (name, (x, y)), colour in zip(series.items(), _cycle(), strict=False):
            single = len(x) == 1
            axes.plot(x, y, color=colour, linewidth=1.6, label=write(name), marker="o" if single else "")
        if logarithmic:
            axes.set_yscale("log")
        axes.set_xlabel(write(x_axis))
        axes.set_ylabel(write(y_axis))
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        if len(series) > 1:
            axes.legend(frameon=False)
        _titles(figure, axes, write(title), write(note))
        return figure


def bars(values: Mapping[str, float], *, title: str, axis: str, note: str = "") -> Figure:
    """Horizontal bars, in the given order from top to bottom."""
    with _styled([title, axis, note, *values]) as write:
        figure, axes = _canvas(7.0, 1.4 + 0.3 * len(values))
        names = [write(name) for name in values]
        drawn = axes.barh(range(len(names)), list(values.values()), color=COLOURS[0], height=0.7)
        axes.bar_label(drawn, fmt="%.4g", padding=3, fontsize=8)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlabel(write(axis))
        axes.spines[["top", "right"]].set_visible(False)
        _titles(figure, axes, write(title), write(note))
        return figure


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure whole or not at all, in the format of the path's suffix.

    Raises:
        DataError: a suffix that is none of .png, .svg, .pdf.
    """
    from isoform.config.files import write_bytes

    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise DataError(f"{path}: cannot draw {path.suffix or 'no suffix'!r}; expected {', '.join(SUFFIXES)}")
    write_bytes(path, render(figure, path.suffix[1:]))


def render(figure: Figure, form: str = "png") -> bytes:
    """A figure as the bytes of a file. The same drawing gives the same bytes."""
    buffer = io.BytesIO()
    steady: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "isoform"}):
        figure.savefig(buffer, format=form, dpi=144, metadata=steady.get(form, {"Software": None}))
    return buffer.getvalue()


@dataclasses.dataclass(frozen=True)
class Lettering:
    """Writes a text with the characters that the installed fonts have, and others as their code.

    Args:
        families: the fonts to look in, in order.
        missing: characters that none of them has.
    """

    families: tuple[str, ...]
    missing: frozenset[str]

    def __call__(self, text: str) -> str:
        """The text as matplotlib shall show it, dollar signs included."""
        plain = "".join(f"\\u{ord(char):04x}" if char in self.missing else char for char in text)
        return plain.replace("$", r"\$")


def lettering(texts: Iterable[str]) -> Lettering:
    """Find fonts for some texts: DejaVu Sans first, then whatever installed font has what it lacks."""
    from matplotlib import font_manager

    wanted = {char for text in texts for char in text if not char.isspace()}
    families: list[str] = []
    first = font_manager.findfont("DejaVu Sans")
    # The last-resort font has a glyph for everything, but it is a frame with the script's name.
    others = (f for f in font_manager.fontManager.ttflist if f.fname != first and "Last Resort" not in f.name)
    for path, family in [(first, "DejaVu Sans"), *((f.fname, f.name) for f in others)]:
        if families and not wanted:
            break
        try:
            font = font_manager.get_font(path)
            covered = {char for char in wanted if font.get_char_index(ord(char))}
        except (OSError, RuntimeError):  # a font file that is gone or damaged
            continue
        if covered or not families:
            families.append(family)
            wanted -= covered
    return Lettering(tuple(families), frozenset(wanted))


@contextlib.contextmanager
def _styled(texts: Iterable[str]) -> Generator[Lettering]:
    """Fonts for the texts while a figure is made; a text keeps those it was made under."""
    import matplotlib

    write = lettering(texts)
    with matplotlib.rc_context({"font.family": list(write.families), "font.size": 9}):
        yield write


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(min(width, 24.0), min(height, 24.0)), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _titles(figure: Figure, axes: Axes, title: str, note: str) -> None:
    width = int(figure.get_figwidth() * 9)  # characters that fit above the axes
    axes.set_title("\n".join(textwrap.wrap(title, width)), loc="left", fontsize=11)
    if note:
        figure.supxlabel(note, fontsize=8, color="#4a5568")


def _cycle() -> Iterable[str]:
    while True:
        yield from COLOURS
