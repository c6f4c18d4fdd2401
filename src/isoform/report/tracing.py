"""`isoform trace` of a text on a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from isoform.report.figures import READING_PATTERN
from isoform.report.terminal import heading, indented, number, table, visible

COLUMNS = 6
"""How many layers are shown side by side."""


def show(console: Console, trace: Mapping[str, Any]) -> None:
    """Print a trace.

    Args:
        console: where.
        trace: ``tokens`` and ``source`` (each ``id`` and ``token``), ``sublayers`` and ``guesses``.
    """
    if trace["source"] is not None:
        console.print(Text.assemble(("source  ", "dim"), _joined(trace["source"])))
    console.print(Text.assemble(("tokens  ", "dim"), _joined(trace["tokens"])))
    _stream(console, trace["sublayers"])
    if trace["guesses"]:
        _guesses(console, trace["tokens"], trace["guesses"])


def attention(
    console: Console,
    weights: Sequence[Sequence[float]],
    queries: Sequence[str],
    keys: Sequence[str],
    which: str,
) -> None:
    """The weights of one head in percent, with what they are not (R36)."""
    console.print(
        heading(f"Attention weights, {which}", f"percent; rows read, columns are read; {READING_PATTERN}")
    )
    rows = [
        [visible(name), *(_percent(value) for value in row)]
        for name, row in zip(queries, weights, strict=True)
    ]
    console.print(indented(table(["", *map(visible, keys)], rows, right=range(1, len(keys) + 1))))


def _stream(console: Console, sublayers: Sequence[Mapping[str, Any]]) -> None:
    console.print(
        heading(
            "The stream, update by update",
            "root mean squares; keys read: e to the entropy of the weights, mean of the heads (least – most)",
        )
    )
    rows: list[Sequence[object]] = []
    for update in sublayers:
        reach = [math.exp(value) for value in update["entropy"]]
        read = f"{sum(reach) / len(reach):.1f} ({min(reach):.1f} – {max(reach):.1f})" if reach else ""
        rows.append(
            [
                f"{update['stack']} {update['layer']}",
                update["kind"].replace("_", "-"),
                " × ".join(str(size) for size in update["shape"]),
                number(update["increment"], 3),
                number(update["stream"], 3),
                read,
            ]
        )
    columns = ["layer", "update", "shape", "adds", "stream", "keys read"]
    console.print(indented(table(columns, rows, right=(3, 4))))


def _guesses(
    console: Console,
    tokens: Sequence[Mapping[str, Any]],
    guesses: Sequence[Sequence[Sequence[Mapping[str, Any]]]],
) -> None:
    last = len(guesses) - 1
    step = max(1, math.ceil(last / (COLUMNS - 1)))
    layers = list(range(0, last, step))
    console.print(
        heading(
            "What it would say so far",
            "likeliest token at each position, the stream of a layer sent through final norm and head; "
            "the last column is the answer",
        )
    )
    rows: list[Sequence[object]] = []
    for place, token in enumerate(tokens):
        row = [visible(token["token"]), *(_guess(guesses[layer][place][0]) for layer in layers)]
        rows.append([*row, Text("  ").join(_guess(guess) for guess in guesses[last][place])])
    console.print(indented(table(["position", *(f"layer {i}" for i in layers), "answer"], rows)))


def _guess(guess: Mapping[str, Any]) -> Text:
    return Text.assemble(visible(guess["token"]), (f" {_percent(guess['probability'])}%", "dim"))


def _percent(share: float) -> str:
    return f"{100 * share:.0f}"


def _joined(tokens: Sequence[Mapping[str, Any]]) -> str:
    return " ".join(visible(token["token"]) for token in tokens)
