"""``isoform optimize``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from isoform.cli import common


def command(
    context: typer.Context,
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
    references: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="What each line of --data should give: both networks write it, and --metric says how near.",
            show_default=False,
        ),
    ] = None,
    metric: Annotated[
        Literal["exact_match", "chrf", "bleu", "ter", "token_error_rate", "character_error_rate"],
        typer.Option(help="Of the task, with --references."),
    ] = "exact_match",
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="The longest continuation that is compared.")
    ] = 64,
    json: common.Json = False,
) -> None:
    """Write an artifact with narrow weights, and say what that costs in quality.

    Both networks read the same prompts and the same continuations: how often they would choose the same
    token, and by how much their scores and their likelihoods differ. With --references each also writes on
    its own.
    """
    from isoform.checkpoints import load
    from isoform.data.files import lines
    from isoform.optimized import Quality, Task, optimize

    if references is None:
        common.refuse_idle(context, ("metric",), "is of the task: give --references too")
    texts = None if data is None else list(lines(data, "utf-8"))
    right = None if references is None else list(lines(references, "utf-8"))
    if texts is not None and right is None:
        texts = [line for line in texts if line.strip()]
    made = optimize(
        load(source),
        weights=weights,
        keep=tuple(keep or ()),
        texts=texts,
        references=right,
        metric=metric,
        max_new_tokens=max_new_tokens,
    )
    made.save(output)
    noted = made.provenance["optimized"]
    if json:
        common.emit({"folder": output, **noted})
        return
    if "quality" in noted:
        print("\n".join(Quality(**noted["quality"]).lines()))
    if "task" in noted:
        print(Task(**noted["task"]).line())
    print(f"wrote {output}")
