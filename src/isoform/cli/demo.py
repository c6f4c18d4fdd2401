"""``isoform demo``: the whole job on the built-in dates."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isoform.cli.common import Json

if TYPE_CHECKING:
    from rich.console import Console

    from isoform.demo import DemoResult


def command(
    output: Annotated[
        Path, typer.Option(help="Folder for the run, the artifact, demo.json and demo.html.")
    ] = Path("demo-output"),
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Changes to the run file, e.g. training.steps=200."),
    ] = None,
    json: Json = False,
) -> int:
    """Train, evaluate, save, reload and prove a model on the built-in dates; no download.

    Writes demo.json and a page, demo.html. Exit status 1 when a check does not hold.
    """
    from isoform.demo import configuration, run
    from isoform.report.terminal import console

    quiet = json or not sys.stderr.isatty()
    out = console(error=True)
    result = run(
        output,
        config=configuration(overrides or ()),
        say=lambda text: out.print(f"[dim]· {text}[/]"),
        quiet=quiet,
    )
    if json:
        sys.stdout.write((output / "demo.json").read_text(encoding="utf-8"))
    else:
        _print(console(), result, output)
    return 0 if result.passed else 1


def _print(out: Console, result: DemoResult, output: Path) -> None:
    from isoform.demo.page import components
    from isoform.report import terminal

    out.print(terminal.heading("Parameters", "closed form, per component"))
    rows = [*components(result), ["all, counted in the real module", None, None, result.counted]]
    out.print(terminal.table(["component", "of one", "how often", "parameters"], rows, total=True))
    out.print(terminal.heading("Unseen dates", f"{result.seconds['train']:.0f} s of training"))
    scores = [[name, score.value, score.signature] for name, score in result.scores.items()]
    out.print(terminal.table(["metric", "value", "signature"], scores))
    out.print(terminal.heading("Checks"))
    checks = [[terminal.verdict(c.passed), c.name, c.statement] for c in result.checks]
    out.print(terminal.table(["", "check", "what was seen"], checks))
    out.print(terminal.heading("Translations"))
    out.print(terminal.table(["asked", "answered"], [list(pair) for pair in result.translations]))
    out.print(
        f"\n[dim]{output / 'demo.html'} · {output / 'demo.json'} · model in {output / 'run' / 'artifact'}[/]"
    )
