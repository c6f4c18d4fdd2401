"""``isoform show``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from isoform.cli import common

if TYPE_CHECKING:
    from isoform.config import ModelConfig


def command(
    target: common.TargetName,
    against: Annotated[
        str | None, typer.Option(metavar="TARGET", help="Say what differs from this one, and nothing else.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows B of the table of shapes.")] = 2,
    length: Annotated[int, typer.Option(min=1, help="Tokens T of the table of shapes.")] = 16,
    source_length: Annotated[int, typer.Option(min=1, help="Source tokens S of an encoder–decoder.")] = 12,
    json: common.Json = False,
) -> int:
    """The architecture in words, who may read whom, shapes, and parameters in closed form and by count.

    Exit status 1: a component's closed form and its modules disagree.
    """
    found = common.resolve(target)
    config = found.architecture()
    if against is not None:
        _against(target, config, against, common.resolve(against).architecture(), json)
        return 0
    return _show(found, config, batch, length, source_length, json)


def _against(first: str, a: ModelConfig, second: str, b: ModelConfig, json: bool) -> None:
    from isoform.config import difference, difference_in_words

    sentences = difference_in_words(a, b)
    if json:
        fields = [{"path": d.path, "a": d.a, "b": d.b, "statement": d.sentence} for d in difference(a, b)]
        common.emit(
            {"a": first, "b": second, "differs": bool(fields), "statements": sentences, "fields": fields}
        )
        return
    from isoform.report import architecture, terminal

    architecture.differences(terminal.console(), first, second, sentences)


def _show(
    found: common.Target, config: ModelConfig, batch: int, length: int, source_length: int, json: bool
) -> int:
    import torch

    from isoform.config import describe
    from isoform.cost.shapes import shapes
    from isoform.nn import Transformer, build
    from isoform.verify.counts import count
    from isoform.verify.grids import grids

    model = found.model
    if not isinstance(model, Transformer):
        with torch.device("meta"):
            model = build(config)
    source = source_length if config.structure == "encoder-decoder" else None
    table = shapes(config, batch=batch, length=length, source_length=source)
    counts, views, words = count(model), grids(config), describe(config)
    if json:
        common.emit(
            {
                "target": found.name,
                "words": words,
                "visibility": views,
                "shapes": [row._asdict() for row in table],
                "parameters": counts,
                "agree": counts.agree,
                "shared": model.tied(),
                "config": config,
            }
        )
        return 0 if counts.agree else 1
    from isoform.report import architecture, terminal

    console = terminal.console()
    architecture.words(console, words)
    architecture.visibility(console, common.plain(views))
    architecture.shapes(console, table, f"B = {batch}, T = {length}{f', S = {source}' if source else ''}")
    architecture.parameters(console, common.plain(counts), agree=counts.agree)
    architecture.ties(console, model.tied())
    return 0 if counts.agree else 1
