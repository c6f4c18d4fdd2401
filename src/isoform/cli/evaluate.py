"""``isoform evaluate``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from isoform.cli import common
from isoform.errors import ConfigError

if TYPE_CHECKING:
    from isoform.checkpoints import Bundle
    from isoform.data import Part
    from isoform.evaluation import Evaluation, SideBySide

DATA, FORM, SEARCH = "Data", "Output", "Search"


def command(
    context: typer.Context,
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET [OTHER]",
            help="An artifact or a checkpoint directory of a known family; a second one is held against it.",
            show_default=False,
        ),
    ],
    data: Annotated[
        Path,
        typer.Option(
            help="A file of pairs, labels or text; or a run file, whose test part is read (--part).",
            show_default=False,
        ),
    ],
    references: Annotated[
        Path | None,
        typer.Option(
            help="The references, line by line, where --data holds inputs alone.", rich_help_panel=DATA
        ),
    ] = None,
    fields: Annotated[
        str,
        typer.Option(
            metavar="A,B",
            help="Columns of .tsv (1,2), fields of .jsonl (source,target), languages of .tmx.",
            rich_help_panel=DATA,
            show_default=False,
        ),
    ] = "",
    documents: Annotated[
        Literal["stream", "lines"] | None,
        typer.Option(help="Plain text: one stream, or a document a line.", rich_help_panel=DATA),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a stream read at once.", rich_help_panel=DATA),
    ] = None,
    part: Annotated[
        Literal["train", "validation", "test"],
        typer.Option(help="Of a run's data.", rich_help_panel=DATA),
    ] = "test",
    pool_references: Annotated[
        bool,
        typer.Option(
            "--pool-references",
            help="Records with the same source are one item with several references.",
            rich_help_panel=DATA,
        ),
    ] = False,
    metrics: Annotated[
        str,
        typer.Option(
            metavar="NAME,…",
            help="Default: those that fit the data. token_error_rate is the word error rate, or the phoneme "
            "error rate where the words are phonemes.",
            rich_help_panel=FORM,
            show_default=False,
        ),
    ] = "",
    by: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX",
            help="Also score groups: what the expression's first group finds in the source.",
            rich_help_panel=FORM,
        ),
    ] = None,
    bootstrap: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Resamples for 95 % intervals; unset: none for one network, 1000 for two.",
            rich_help_panel=FORM,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the resamples.", rich_help_panel=FORM)] = 12345,
    outputs: Annotated[
        Path | None,
        typer.Option(
            help="Write input, output and references here, a JSON object a line.", rich_help_panel=FORM
        ),
    ] = None,
    beam: Annotated[
        int | None,
        typer.Option(min=1, help="Beam search of this width instead of greedy.", rich_help_panel=SEARCH),
    ] = None,
    length_penalty: Annotated[
        Literal["none", "length", "gnmt"], typer.Option(help="As of generate.", rich_help_panel=SEARCH)
    ] = "none",
    alpha: Annotated[float, typer.Option(help="Exponent of the penalty.", rich_help_panel=SEARCH)] = 1.0,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest output.", rich_help_panel=SEARCH)
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts at a time.", rich_help_panel=SEARCH)] = 64,
    as_json: common.Json = False,
) -> None:
    """Score a network on data it was not trained on, each figure with its signature; or two side by side,
    with paired tests on the same resampled data.

    With --json: {"scores": {name: {value, signature, count, better, interval, parts}}, "groups": {name:
    {group: …}}, "items": how many}; of two {"targets": both, "scores": {name: {first, second, difference,
    interval, p_value}}, "not_tested": {name: why}, "items"}.
    """
    from isoform.evaluation import Bootstrap, Settings, evaluate, side_by_side
    from isoform.evaluation.files import classes_of
    from isoform.generation import Beam

    if len(targets) > 2:
        raise ConfigError(f"{len(targets)} networks given: one is scored, or two are held against each other")
    if beam is None and length_penalty != "none":
        raise ConfigError("--length-penalty ranks beams: give --beam too")
    if beam is None:
        common.refuse_idle(context, ("alpha",), "is of a beam: give --beam too")
    elif length_penalty == "none":
        common.refuse_idle(context, ("alpha",), "is an exponent of the penalty: give --length-penalty too")
    resamples = (1000 if len(targets) == 2 else 0) if bootstrap is None else bootstrap
    if len(targets) == 2 and not resamples:
        raise ConfigError("--bootstrap 0: two networks are tested on resampled data; expected at least 1")
    if not resamples:
        common.refuse_idle(context, ("seed",), "is of resamples: give --bootstrap too")
    settings = Settings(
        metrics=[name.strip() for name in metrics.split(",")] if metrics else None,
        search=None if beam is None else Beam(beam, length_penalty, alpha=alpha),
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        pool_references=pool_references,
        group=None if by is None else _group(by),
        bootstrap=Bootstrap(resamples, seed) if resamples else None,
    )
    source = (references, [f.strip() for f in fields.split(",")] if fields else [], documents, window)
    found: list[Evaluation] = []
    for target in targets:
        bundle = common.resolve(target).bundle
        if bundle is None:
            raise ConfigError(f"{target}: no artifact or checkpoint: there are no weights to score")
        read = _part(bundle, data, part, *source)
        found.append(evaluate(bundle, read, settings, classes=list(classes_of(bundle))))
    if outputs is not None:
        _write(outputs, found)
    if len(found) == 2:
        both = side_by_side(found[0], found[1], Bootstrap(resamples, seed))
        if as_json:
            items = len(found[0].items)
            common.emit(
                {"targets": targets, "scores": both.tests, "not_tested": both.untested, "items": items}
            )
        else:
            _show_both(targets, both)
    elif as_json:
        common.emit({"scores": found[0].scores, "groups": found[0].groups, "items": len(found[0].items)})
    else:
        _show(found[0])


def _part(
    bundle: Bundle,
    path: Path,
    part: Literal["train", "validation", "test"],
    references: Path | None,
    fields: list[str],
    documents: Literal["stream", "lines"] | None,
    window: int | None,
) -> Part:
    from isoform.config.files import SUFFIXES
    from isoform.evaluation.files import data_of_file, part_of

    if path.suffix in SUFFIXES:
        from isoform.training import data_folder, read_run

        run = read_run(path)
        if window is None and run.training.batches.kind == "windows":
            window = run.training.batches.length
        return part_of(bundle, run.data, part, data_folder(path), window=window)
    data = data_of_file(bundle, path, references=references, fields=fields, documents=documents)
    return part_of(bundle, data, "test", Path(), window=window)


def _group(expression: str) -> Callable[[Any], str]:
    from isoform.data.records import columns

    try:
        pattern = re.compile(expression)
    except re.error as error:
        raise ConfigError(f"--by: not a regular expression: {error}") from None
    if pattern.groups < 1:
        raise ConfigError(f"--by: {expression!r} has no group: put what names the group in parentheses")

    def group(record: Any) -> str:
        text = next(iter(columns([record]).values()))[0]
        match = pattern.search(text)
        return "(none)" if match is None else match.group(1) or ""

    return group


def _write(path: Path, found: list[Evaluation]) -> None:
    from isoform.config.files import write_text

    rows: list[dict[str, Any]] = [common.plain(item) for item in found[0].items]
    for other in found[1:]:
        rows = [{**row, "other_output": item.output} for row, item in zip(rows, other.items, strict=True)]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    write_text(path, "".join(f"{line}\n" for line in lines))


def _show_both(targets: list[str], both: SideBySide) -> None:
    from isoform.report import terminal

    page = terminal.console()
    rows = [
        (
            name,
            f"{test.first.value:.4f}",
            f"{test.second.value:.4f}",
            f"{test.difference:+.4f}",
            f"{test.interval[0]:+.4f} – {test.interval[1]:+.4f}",
            f"{test.p_value:.3f}",
            test.first.signature,
        )
        for name, test in both.tests.items()
    ]
    columns = ("metric", "first", "second", "difference", "95 %", "p", "signature")
    page.print(f"first: {targets[0]}\nsecond: {targets[1]}")
    page.print(terminal.table(columns, rows, right=(1, 2, 3, 4, 5)))
    for name, reason in both.untested.items():
        page.print(f"{name}: {reason}")


def _show(found: Evaluation) -> None:
    from isoform.report import terminal

    rows: list[tuple[object, ...]] = []
    for name, score in found.scores.items():
        ends = "" if score.interval is None else " – ".join(f"{end:.4f}" for end in score.interval)
        rows.append((name, f"{score.value:.4f}", ends, score.count, score.signature))
        rows += [(f"  {part}", f"{value:.4f}", "", "", "") for part, value in score.parts.items()]
    page = terminal.console()
    page.print(terminal.table(("metric", "value", "95 %", "over", "signature"), rows, right=(1, 3)))
    for name, groups in found.groups.items():
        page.print(terminal.heading(f"{name} by group"))
        each = [[group, f"{score.value:.4f}", score.count] for group, score in groups.items()]
        page.print(terminal.table(("group", "value", "over"), each, right=(1, 2)))
