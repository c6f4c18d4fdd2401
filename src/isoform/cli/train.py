"""``isoform train``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isoform.cli import common

if TYPE_CHECKING:
    from isoform.training import TrainResult

RunFile = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="A run file; isoform init writes one.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Settings that replace the file's, by dotted name: training.seed=2",
        show_default=False,
    ),
]
DataFolder = Annotated[
    Path | None,
    typer.Option(
        "--data", help="Where the data's relative paths start; the run file's folder if unset.", metavar="DIR"
    ),
]


def command(
    config: RunFile,
    overrides: Overrides = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="DIR", help="The run's folder; runs/ and the file's name if unset."
        ),
    ] = None,
    data: DataFolder = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No bar and no remarks.")] = False,
    json: common.Json = False,
) -> int:
    """Train, choose the weights by validation, score the test part once, and write the artifact.

    The same command goes on where an earlier one was stopped, to the very same numbers.

    Exit status 130 or 143: stopped by SIGINT or SIGTERM, everything saved.
    """
    from isoform.training import data_folder, read_run, train

    run = read_run(config, overrides or ())
    folder = Path("runs") / config.stem if output is None else output
    result = train(run, folder, base=data_folder(config) if data is None else data, quiet=quiet)
    speaks = common.speaks()
    if speaks and json:
        common.emit(result.to_dict())
    elif speaks and result.finished:
        _show(result)
    signal = result.fit.signal
    if signal is None or result.finished:
        return 0
    if speaks:
        common.remark(f"stopped after step {result.fit.state.step}; the same command goes on from there")
    return 128 + signal


def _show(result: TrainResult) -> None:
    from isoform.report import terminal

    console, fit = terminal.console(), result.fit
    nll = "" if fit.validation_nll is None else f", validation NLL {fit.validation_nll:.4f}"
    state = fit.state
    console.print(
        f"{state.step:,} steps in {state.seconds:,.0f} s ({fit.stop}), {state.waited / state.seconds:.1%} of"
        f" it waiting for data; weights: {fit.weights}{nll}"
    )
    if result.test:
        rows = [(name, metric["value"], metric["signature"]) for name, metric in result.test.items()]
        console.print(terminal.table(("test", "value", "signature"), rows))
    assert result.artifact is not None
    console.print(f"{result.artifact.name}: {result.artifact}")
