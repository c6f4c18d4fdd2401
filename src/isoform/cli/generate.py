"""``isoform generate``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from isoform.cli import common
from isoform.errors import ConfigError, DataError

if TYPE_CHECKING:
    from isoform.generation import Search
    from isoform.generation.texts import TextOutput

CHOICE, LIMITS, SPEED, FORM = "Choice of token", "Limits", "Speed", "Output"


def command(
    context: typer.Context,
    target: common.TargetName,
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE", help="Texts, one a line; stdin if none.", show_default=False),
    ] = None,
    beam: Annotated[
        int | None,
        typer.Option(min=1, help="Beam search of this width instead of greedy.", rich_help_panel=CHOICE),
    ] = None,
    length_penalty: Annotated[
        Literal["none", "length", "gnmt"],
        typer.Option(
            help="What beams' log-probabilities are divided by: 1, length^alpha, ((5 + length)/6)^alpha.",
            rich_help_panel=CHOICE,
        ),
    ] = "none",
    alpha: Annotated[float, typer.Option(help="Exponent of the penalty.", rich_help_panel=CHOICE)] = 1.0,
    early_stopping: Annotated[
        Literal["when_full", "heuristic", "never"],
        typer.Option(
            help="When beams stop: as soon as all are complete, when none looks better, when none can be.",
            rich_help_panel=CHOICE,
        ),
    ] = "heuristic",
    temperature: Annotated[
        float | None,
        typer.Option(help="Draw tokens; divides the scores before.", rich_help_panel=CHOICE),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Draw from so many best tokens.", rich_help_panel=CHOICE)
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Draw from the best tokens of this mass.", rich_help_panel=CHOICE),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.", rich_help_panel=CHOICE)] = 0,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Longest output; 256, or what the positions leave, if unset.",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    min_new_tokens: Annotated[int, typer.Option(min=0, help="Shortest output.", rich_help_panel=LIMITS)] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts at a time.", rich_help_panel=SPEED)] = 64,
    compile: Annotated[
        Literal["auto", "never", "always"],
        typer.Option(
            help="Steps in machine code: where it is there or pays for its making, never, or always.",
            rich_help_panel=SPEED,
        ),
    ] = "auto",
    n_best: Annotated[
        int, typer.Option(min=1, help="Outputs a text: of a beam, or drawn.", rich_help_panel=FORM)
    ] = 1,
    scores: Annotated[
        bool,
        typer.Option("--scores", help="Put each output's score before it.", rich_help_panel=FORM),
    ] = False,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Leave line breaks in outputs as they are.", rich_help_panel=FORM),
    ] = False,
    as_json: common.Json = False,
) -> None:
    """Generate a line of output for every line of input.

    An encoder–decoder translates, a decoder continues. Columns of several outputs and scores are separated by
    tabs; tabs and line breaks inside an output are written as \\t and \\n unless --raw. An empty line gives
    an empty line. With --json every line is an object: input, and outputs with text, score, log_probability,
    finished, ids.
    """
    from isoform.generation.texts import TextGenerator

    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    if beam is None:
        common.refuse_idle(context, ("alpha", "early_stopping"), "is of a beam: give --beam too")
    elif length_penalty == "none":
        common.refuse_idle(context, ("alpha",), "is an exponent of the penalty: give --length-penalty too")
    if temperature is None and top_k is None and top_p is None:
        common.refuse_idle(context, ("seed",), "is of draws: give --temperature, --top-k or --top-p too")
    search = _search(beam, (length_penalty, alpha, early_stopping), sampling, seed, n_best)
    bundle = common.resolve(target).bundle
    if bundle is None:
        raise ConfigError(f"{target}: no artifact or checkpoint: there are no weights to generate with")
    writer = TextGenerator(
        bundle,
        search=search,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        batch_size=batch_size,
        compile=compile,
    )
    alone = not files and sys.stdin.isatty()  # someone is typing: answer every line at once
    window = 1 if alone else max(1024, batch_size)
    progress = None if sys.stdout.isatty() else "generating"
    for line, outputs in writer.stream(_lines(files or []), window=window, progress=progress):
        text = _record(line, outputs) if as_json else _row(outputs, scores, raw)
        print(text, flush=alone)


def _search(
    beam: int | None,
    penalty: tuple[Literal["none", "length", "gnmt"], float, Literal["when_full", "heuristic", "never"]],
    sampling: dict[str, Any],
    seed: int,
    n_best: int,
) -> Search:
    from isoform.generation import Beam, Greedy, Sample

    drawn = {name: value for name, value in sampling.items() if value is not None}
    if beam is not None:
        if drawn:
            raise ConfigError(
                f"--beam searches, --{next(iter(drawn)).replace('_', '-')} draws: give one of them"
            )
        kind, alpha, early = penalty
        return Beam(beam, kind, alpha=alpha, n_best=n_best, early_stopping=early)
    if penalty[0] != "none":
        raise ConfigError("--length-penalty ranks beams: give --beam too")
    if drawn:
        return Sample(**drawn, seed=seed, n=n_best)
    if n_best > 1:
        raise ConfigError("--n-best needs several outputs: give --beam, or --temperature to draw them")
    return Greedy()


def _lines(files: list[Path]) -> Iterator[str]:
    from isoform.data.files import lines

    for file in files:
        yield from lines(file, "utf-8")
    if files:
        return
    try:
        for line in sys.stdin:
            yield line.removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise DataError(f"stdin: not UTF-8 at byte {error.start} of what was read last") from None


def _row(outputs: list[TextOutput], scores: bool, raw: bool) -> str:
    texts = [o.text if raw else _escaped(o.text) for o in outputs]
    if not scores:
        return "\t".join(texts)
    return "\t".join(f"{o.score:.4f}\t{text}" for o, text in zip(outputs, texts, strict=True))


def _escaped(text: str) -> str:
    """One line, one column."""
    for plain, written in (("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t")):
        text = text.replace(plain, written)
    return text


def _record(line: str, outputs: list[TextOutput]) -> str:
    return json.dumps({"input": line, "outputs": [common.plain(o) for o in outputs]}, ensure_ascii=False)
