"""`isoform check` on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from isoform.report.cost import size
from isoform.report.terminal import heading, indented, table, visible

BAR = 40  # columns of the longest bar
SHOWN = 40  # tokens of a sample


def data(console: Console, answer: Mapping[str, Any]) -> None:
    """Print what was found out about the data.

    Args:
        console: where.
        answer: ``parts``, ``samples``, ``problems`` and ``remarks``.
    """
    rows = [_row(name, side, part) for name, part in answer["parts"].items() for side in part["sides"]]
    columns = ("part", "records", "side", "tokens", "unknown", "min", "median", "95 %", "max", "padding")
    console.print(table(columns, rows, right=range(3, len(columns))))
    for side, report in answer["parts"]["train"]["sides"].items():
        console.print(heading(f"Tokens a record, {side} of the training part"))
        console.print(indented(_histogram(report["histogram"])))
    console.print(heading("As the network sees it"))
    for sample in answer["samples"]:
        console.print(indented(_sample(sample)))
    for name, style in (("problems", "bold red"), ("remarks", "yellow")):
        for line in answer[name]:
            console.print(Text.assemble((f"{name[:-1]}: ", style), line))


def run(console: Console, answer: Mapping[str, Any]) -> None:
    """Print what was found out about a run: the data, and one step.

    Args:
        console: where.
        answer: what `data` takes, with ``parameters``, ``trial``, ``steps``, ``epochs``, ``steps_per_epoch``,
            ``seconds`` and ``padding_share``.
    """
    data(console, answer)
    trial = answer["trial"]
    console.print(heading("One step on the largest batch"))
    lines = [
        f"{trial['rows']:,} rows, {trial['tokens']:,} ids with padding, {trial['supervised']:,} supervised",
        f"{trial['seconds']:.2f} s forward and backward; loss {trial['loss']:.3f}",
        f"{size(trial['activation_bytes'])} held for the backward pass,"
        f" {size(trial['weight_bytes'])} weights, gradients and optimizer",
    ]
    console.print(indented(Text("\n".join(lines))))
    console.print(heading("The run"))
    console.print(indented(Text("\n".join(_plan(answer)))))


def _row(name: str, side: str, part: Mapping[str, Any]) -> tuple[object, ...]:
    report, filled = part["sides"][side], part["batches"]
    lengths = report["lengths"]
    first = side == next(iter(part["sides"]))
    return (
        name if first else "",
        f"{part['records']:,}" if first else "",
        side,
        f"{report['tokens']:,}",
        f"{report['unknown_rate']:.2%}",
        *(f"{lengths[key]:,.0f}" for key in ("min", "median", "p95", "max")),
        f"{filled['share']:.1%}" if first and filled else "",
    )


def _histogram(bins: Any) -> Text:
    most = max((count for _, _, count in bins), default=1)
    width = max((len(f"{low}-{high}") for low, high, _ in bins), default=1)
    lines = [
        f"{f'{low}-{high}' if high > low else str(low):>{width}} {'█' * round(BAR * count / most)} {count:,}"
        for low, high, count in bins
    ]
    return Text("\n".join(lines))


def _sample(sample: Mapping[str, Any]) -> Text:
    text = Text(f"{sample['where']}\n", style="dim")
    for name, side in sample["sides"].items():
        text.append(f"  {name}: ", style="bold")
        text.append(f"{_shortened(side['text'], SHOWN * 4)}\n", style="default")
        tokens = side["tokens"]
        more = "" if len(tokens) <= SHOWN else f" … ({len(tokens):,})"
        text.append(f"    {_shortened(' · '.join(map(visible, tokens[:SHOWN])), None)}{more}\n", style="cyan")
    return text


def _shortened(text: str, limit: int | None) -> str:
    """On one line."""
    cut = text if limit is None or len(text) <= limit else f"{text[:limit]} …"
    return cut.replace("\n", "⏎").replace("\t", "⇥")


def _plan(answer: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{answer['parameters']:,} parameters",
        f"{answer['steps_per_epoch']:,.1f} updates an epoch;"
        f" {answer['padding_share']:.1%} of the ids are padding",
    ]
    if answer["steps"] is not None:
        lines.append(
            f"{answer['steps']:,} updates, {answer['epochs']:.1f} epochs; at the speed of that step"
            f" {answer['seconds'] / 60:,.1f} minutes"
        )
    return lines
