"""``isoform optimize``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from isoform.cli import common


def command(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="ARTIFACT", help="An artifact, or a checkpoint that can be imported.", show_default=False
        ),
    ],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.", show_default=False)],
    weights: Annotated[
        Literal["int8", "int8_dynamic", "bfloat16"],
        typer.Option(
            help="int8, a scale an output channel; int8_dynamic, inputs rounded too, the fastest; bfloat16."
        ),
    ] = "int8",
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A map that stays float32, e.g. head; * for any name; repeatable.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Prompts or sources, one a line, to measure the loss of quality on; random ids if unset.",
            show_default=False,
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="The longest continuation that is compared.")
    ] = 64,
    json: common.Json = False,
) -> None:
    """Write an artifact with narrow weights, and say what that costs in quality.

    Both networks read the same prompts and the same continuations: how often they would choose the same
    token, and by how much their scores and their likelihoods differ.
    """
    from isoform.checkpoints import load
    from isoform.data.files import lines
    from isoform.optimized import Quality, optimize

    texts = None if data is None else [line for line in lines(data, "utf-8") if line.strip()]
    made = optimize(
        load(source), weights=weights, keep=tuple(keep or ()), texts=texts, max_new_tokens=max_new_tokens
    )
    made.save(output)
    noted = made.provenance["optimized"]
    if json:
        common.emit({"folder": output, **noted})
        return
    if "quality" in noted:
        print("\n".join(Quality(**noted["quality"]).lines()))
    print(f"wrote {output}")
