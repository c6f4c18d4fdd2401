"""``isoform ablate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isoform.cli import common
from isoform.cli.train import DataFolder, Overrides, RunFile
from isoform.errors import ConfigError

if TYPE_CHECKING:
    from isoform.training.findings import Ablation


def command(
    config: RunFile,
    overrides: Overrides = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,…",
            help="A setting of the run file (training.label_smoothing), the end of one of the network "
            "(feed_forward.activation), norm.placement, norm.kind, or feed_forward "
            "(relu, gelu, …, glu, geglu, swiglu, …). Give it once for each factor.",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[
        str, typer.Option(metavar="N,…", help="Of weights and dropout; the file's and the next two if unset.")
    ] = "",
    match_parameters: Annotated[
        bool,
        typer.Option(
            "--match-parameters", help="Gated networks as wide as costs what the two-layer ones do (R10)."
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Where the runs go; ablations/NAME if unset.",
        ),
    ] = None,
    data: DataFolder = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No bars and no remarks.")] = False,
    json: common.Json = False,
) -> int:
    """Change one setting at a time, and train every value with several seeds on the same batches.

    The same command goes on where it was stopped. Variants are compared by validation; the test is not read.

    With --json: {"seeds", "variants": [{name, factor, value, is_base, changes, parameters, nll: {count, mean,
    deviation}, difference: {count, mean, deviation, interval}, diverged, runs}], "may_be_concluded",
    "may_not_be_concluded", "finished"}.
    """
    from isoform.training import data_folder
    from isoform.training.ablation import ablate, plan
    from isoform.training.factors import parse_factor

    factors = [parse_factor(text) for text in vary or ()]
    variants = plan(config, overrides or (), factors, matched=match_parameters)
    first = variants[0].run.training.seed
    found = ablate(
        variants,
        _numbers(seeds) if seeds else [first, first + 1, first + 2],
        Path("ablations") / config.stem if output is None else output,
        base=data_folder(config) if data is None else data,
        quiet=quiet,
        say=(lambda line: None) if quiet else common.remark,
    )
    speaks = common.speaks()
    if speaks and json:
        common.emit(found.to_dict())
    elif speaks:
        _show(found)
    if found.signal is None:
        return 0
    if speaks:
        common.remark("stopped; the same command goes on from there")
    return 128 + found.signal


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--seeds {text!r}: expected whole numbers separated by commas") from None


def _show(found: Ablation) -> None:
    from isoform.report import terminal

    console = terminal.console()
    rows: list[tuple[object, ...]] = []
    for finding in found.findings:
        nll, difference = finding.nll, finding.difference
        seconds = [o.seconds for o in finding.outcomes if o.seconds is not None]
        rows.append(
            (
                f"{finding.variant.name} (base)" if finding.variant.is_base else finding.variant.name,
                finding.parameters,
                None if nll is None else _plus_minus(nll.mean, nll.deviation, ""),
                None if difference is None else _plus_minus(difference.mean, difference.deviation, "+"),
                finding.n_diverged,
                f"{sum(seconds) / len(seconds):.0f}" if seconds else None,
            )
        )
    names = ("variant", "parameters", "validation NLL", "to the base", "diverged", "seconds a run")
    console.print(terminal.table(names, rows, right=range(1, 6)))
    for variant in (finding.variant for finding in found.compared()):
        console.print(f"{variant.name}: {'; '.join(variant.changes)}")
    if found.signal is None:
        console.print(terminal.heading("What may be concluded"))
        for line in found.may():
            console.print(line)
        console.print(terminal.heading("What may not"))
        console.print(found.may_not())
        console.print(f"figures: {found.folder / 'ablation.json'}, curves: {found.folder / 'ablation.png'}")


def _plus_minus(mean: float, deviation: float | None, sign: str) -> str:
    spread = "" if deviation is None else f" ± {deviation:.4f}"
    return f"{mean:{sign}.4f}{spread}"
