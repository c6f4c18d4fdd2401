"""``isoform trace``."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from isoform.cli import common
from isoform.errors import ConfigError


def command(
    worked_example: Annotated[
        bool, typer.Option("--worked-example", help="The chapter's two-position layer, equation by equation.")
    ] = False,
    visibility: Annotated[
        Literal["causal", "bidirectional", "prefix"], typer.Option(help="Who may read whom.")
    ] = "causal",
    prefix: Annotated[
        int, typer.Option(help="Leading positions that form the condition, with --visibility prefix.")
    ] = 1,
    placement: Annotated[Literal["pre", "post"], typer.Option(help="Pre-LN or Post-LN.")] = "pre",
    norm: Annotated[Literal["layer", "rms"], typer.Option(help="LayerNorm or RMSNorm.")] = "layer",
    eps: Annotated[float, typer.Option(help="Inside the root of every norm.")] = 0.0,
    json: common.Json = False,
) -> None:
    """A forward pass, step by step."""
    if not worked_example:
        raise ConfigError("trace: expected --worked-example")
    from isoform.verify import worked_example as chapter

    example = chapter.worked_example(
        visibility=visibility, placement=placement, norm=norm, eps=eps, prefix=prefix
    )
    contrast = chapter.contrast(example)
    if json:
        common.emit({**example.to_dict(), "contrast": contrast})
        return
    from isoform.report import terminal
    from isoform.report import worked_example as report

    report.show(
        terminal.console(),
        example.to_dict(),
        against=contrast.against,
        residual1=contrast.residual1,
        loss=contrast.loss,
    )
