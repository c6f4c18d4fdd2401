"""``isoform trace``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from isoform.cli import common
from isoform.errors import ConfigError, DataError

if TYPE_CHECKING:
    from isoform.nn import Transformer
    from isoform.tokens import Tokens
    from isoform.verify.trace import Side, Trace

CHAPTER, MODEL = "The worked example", "A text through a network"


def command(
    context: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            help="An artifact or checkpoint; or a configuration or factory, with --ids.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="What it reads.", show_default=False)
    ] = None,
    continuation: Annotated[
        str | None,
        typer.Option(
            "--target",
            help="What follows the text; an encoder–decoder's own output if unset.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    ids: Annotated[
        bool,
        typer.Option("--ids", help="The texts are token ids, with spaces between.", rich_help_panel=MODEL),
    ] = False,
    top: Annotated[
        int, typer.Option(min=1, help="Guesses shown for each position.", rich_help_panel=MODEL)
    ] = 3,
    attention: Annotated[
        str | None,
        typer.Option(
            metavar="[SIDE:]LAYER:HEAD",
            help="Show the weights of one head; SIDE: encoder, decoder or cross.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Draw them into this .png, .svg or .pdf instead.", rich_help_panel=MODEL),
    ] = None,
    worked_example: Annotated[
        bool,
        typer.Option(
            "--worked-example",
            help="The chapter's two-position layer, equation by equation.",
            rich_help_panel=CHAPTER,
        ),
    ] = False,
    visibility: Annotated[
        Literal["causal", "bidirectional", "prefix"],
        typer.Option(help="Who may read whom.", rich_help_panel=CHAPTER),
    ] = "causal",
    prefix: Annotated[
        int,
        typer.Option(
            help="Positions that form the condition, if visibility is prefix.", rich_help_panel=CHAPTER
        ),
    ] = 1,
    placement: Annotated[
        Literal["pre", "post"], typer.Option(help="Pre-LN or Post-LN.", rich_help_panel=CHAPTER)
    ] = "pre",
    norm: Annotated[
        Literal["layer", "rms"], typer.Option(help="LayerNorm or RMSNorm.", rich_help_panel=CHAPTER)
    ] = "layer",
    eps: Annotated[float, typer.Option(help="Inside the root of every norm.", rich_help_panel=CHAPTER)] = 0.0,
    json: common.Json = False,
) -> None:
    """A forward pass, step by step: the chapter's worked example, or a text through any network."""
    if worked_example:
        if target is not None:
            raise ConfigError("trace: --worked-example has its own network and input; leave TARGET out")
        common.refuse_idle(
            context,
            ("continuation", "ids", "top", "attention", "output"),
            "is for a text through a network; --worked-example has its own",
        )
        if visibility != "prefix":
            common.refuse_idle(context, ("prefix",), "needs --visibility prefix")
        _worked_example(visibility, prefix, placement, norm, eps, json)
        return
    if target is None or text is None:
        raise ConfigError("trace: expected TARGET and TEXT, or --worked-example")
    common.refuse_idle(
        context, ("visibility", "prefix", "placement", "norm", "eps"), "is a setting of --worked-example"
    )
    if output is not None and attention is None:
        raise ConfigError("trace: --output needs --attention LAYER:HEAD")
    _text(target, text, continuation, ids, top, attention, output, json)


def _worked_example(
    visibility: Literal["causal", "bidirectional", "prefix"],
    prefix: int,
    placement: Literal["pre", "post"],
    norm: Literal["layer", "rms"],
    eps: float,
    json: bool,
) -> None:
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


def _text(
    target: str,
    text: str,
    continuation: str | None,
    ids: bool,
    top: int,
    attention: str | None,
    output: Path | None,
    json: bool,
) -> None:
    from isoform.report import figures
    from isoform.verify.trace import trace

    if output is not None and output.suffix not in figures.SUFFIXES:
        raise DataError(f"{output}: cannot draw that; expected {', '.join(figures.SUFFIXES)}")
    found = common.resolve(target)
    model = _network(found)
    tokens, source = _rows(found, model, text, continuation, ids)
    seen = trace(model, tokens, source, top=top)
    shown = _named(found, seen)
    if attention is not None:
        shown["attention"] = _attention(seen, shown, attention)
        if output is not None:
            figures.save(_picture(shown["attention"]), output)
            common.remark(f"wrote {output}")
    if json:
        common.emit({"target": target, **shown})
        return
    from isoform.report import terminal, tracing

    console = terminal.console()
    tracing.show(console, shown)
    if attention is not None and output is None:
        one = shown["attention"]
        tracing.attention(console, one["weights"], one["queries"], one["keys"], one["which"])


def _network(found: common.Target) -> Transformer:
    from isoform.nn import Transformer, build

    if isinstance(found.model, Transformer):
        return found.model
    common.remark(f"{found.name}: a configuration without weights; they are drawn with seed 0")
    return build(found.architecture(), seed=0)


def _rows(
    found: common.Target, model: Transformer, text: str, continuation: str | None, ids: bool
) -> tuple[Tokens, Tokens | None]:
    import torch

    from isoform.tokens import Tokens

    if not ids:
        if found.bundle is None:
            raise ConfigError(f"{found.name}: no tokenizer comes with it; give token ids with --ids")
        from isoform.verify.reading import reading

        return reading(found.bundle, text, continuation)

    def numbers(written: str, size: int) -> list[int]:
        words = written.split()
        if not words or not all(word.isdecimal() and int(word) < size for word in words):
            raise DataError(f"--ids: {written!r}; expected token ids below {size} with spaces between")
        return [int(word) for word in words]

    config = model.config
    first = numbers(text, (config.source or config.embedding).vocab_size)
    after = [] if continuation is None else numbers(continuation, config.embedding.vocab_size)
    if config.source is not None:
        if not after:
            raise DataError("--ids: an encoder–decoder needs --target, the ids that the decoder reads")
        return Tokens(torch.tensor([after])), Tokens(torch.tensor([first]))
    condition = torch.tensor([len(first)]) if config.stack.visibility == "prefix" else None
    return Tokens(torch.tensor([[*first, *after]]), prefix=condition), None


def _named(found: common.Target, seen: Trace) -> dict[str, Any]:
    """The trace as plain data, tokens by name."""
    bundle = found.bundle
    own = None if bundle is None else bundle.tokenizer
    other = own if bundle is None or bundle.source_tokenizer is None else bundle.source_tokenizer

    def name(number: int, tokenizer: Any) -> dict[str, Any]:
        if tokenizer is None or number >= tokenizer.vocab_size:  # a table may have more rows than tokens
            return {"id": number, "token": str(number)}
        return {"id": number, "token": tokenizer.shown(number)}

    return {
        "tokens": [name(i, own) for i in seen.ids],
        "source": None if seen.source_ids is None else [name(i, other) for i in seen.source_ids],
        "sublayers": [common.plain(s) for s in seen.sublayers],
        "guesses": [
            [[{**name(g.id, own), "probability": g.probability} for g in place] for place in layer]
            for layer in seen.guesses
        ],
    }


def _attention(seen: Trace, shown: dict[str, Any], which: str) -> dict[str, Any]:
    from isoform.report.figures import READING_PATTERN

    *sides, layer, head = which.split(":") if which.count(":") in (1, 2) else ("", "", "")
    if not (layer.isdecimal() and head.isdecimal()) or (
        sides and sides[0] not in ("encoder", "decoder", "cross")
    ):
        raise ConfigError(
            f"--attention: {which!r}; expected LAYER:HEAD, or encoder, decoder or cross before it"
        )
    known = {side for side, _ in seen.weights}
    default = next(side for side in ("cross", "decoder", "encoder") if side in known)
    side = cast("Side", sides[0] if sides else default)
    weights = seen.attention(side, int(layer), int(head))
    source = shown["tokens"] if shown["source"] is None else shown["source"]
    reads = source if side == "encoder" else shown["tokens"]
    read = source if side == "cross" else reads
    return {
        "side": side,
        "layer": int(layer),
        "head": int(head),
        "which": f"{side} layer {layer}, head {head}",
        "label": READING_PATTERN,
        "queries": [token["token"] for token in reads],
        "keys": [token["token"] for token in read],
        "weights": weights.tolist(),
    }


def _picture(one: dict[str, Any]) -> Any:
    from isoform.report import figures

    return figures.attention_map(one["weights"], queries=one["queries"], keys=one["keys"], which=one["which"])
