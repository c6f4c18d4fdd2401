"""``isoform cost``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from isoform.cli import common
from isoform.errors import ConfigError

if TYPE_CHECKING:
    from isoform.config import Embedding

UNITS = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**n for n, letter in enumerate("kMGTP", 1)},
    **{f"{letter}iB": 1024**n for n, letter in enumerate("KMGTP", 1)},
}
LENGTH = 512
SMALLEST = 1000  # bytes; a device with less is a forgotten unit


def command(
    target: common.TargetName,
    batch: Annotated[int, typer.Option(min=1, help="Rows, over all devices.")] = 1,
    length: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of the stream the head reads; in decode those known so far. Unset: 512, or as many"
            " as there are learned positions.",
        ),
    ] = None,
    source_length: Annotated[
        int | None, typer.Option(min=1, help="Source tokens of an encoder–decoder; as --length if unset.")
    ] = None,
    prefix_length: Annotated[int, typer.Option(min=0, help="Tokens of a prefix decoder's condition.")] = 0,
    mode: Annotated[
        Literal["train", "prefill", "decode"],
        typer.Option(help="Forward, backward and optimizer; one pass over the input; or one more token."),
    ] = "train",
    dtype: Annotated[
        Literal["float64", "float32", "bfloat16", "float16", "bfloat16_autocast"],
        typer.Option(help="What weights and activations are stored in."),
    ] = "float32",
    optimizer: Annotated[
        Literal["adamw", "adamw_master"],
        typer.Option(help="AdamW, its moments as wide as the weights; or with a float32 master copy."),
    ] = "adamw",
    loss: Annotated[
        Literal["cross_entropy", "chunked"],
        typer.Option(help="Over all logits at once, or piece by piece as isoform train has it."),
    ] = "cross_entropy",
    recomputation: Annotated[
        Literal["none", "layer"], typer.Option(help="What the backward pass runs again instead of storing.")
    ] = "none",
    attention: Annotated[
        Literal["auto", "eager", "sdpa"], typer.Option(help="How attention is computed.")
    ] = "auto",
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Whose kernels.")] = "cpu",
    devices: Annotated[int, typer.Option(min=1, help="How many share the work.")] = 1,
    shard: Annotated[
        Literal["none", "ddp", "fsdp"], typer.Option(help="Whether they replicate or split the weights.")
    ] = "none",
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="What a device has, with a unit (24GiB): does it fit?"),
    ] = None,
    time: Annotated[
        bool, typer.Option("--time", help="Measure this machine's limits, and estimate the time at them.")
    ] = False,
    json: common.Json = False,
) -> int:
    """Parameters, FLOPs and memory of a step, in closed form from the configuration; its least time.

    Exit status 1: it does not fit into --memory.
    """
    limit = None if memory is None else size(memory)
    if limit is not None and limit < SMALLEST:
        raise ConfigError(f"--memory {memory!r}: that is {limit} bytes; expected a unit too, e.g. 24GiB")
    config = common.resolve(target).architecture()
    from isoform.cost import cost, fit, measure_machine

    if config.source is not None and source_length is None:
        source_length = length or _usual(config.source)
    length = length or _usual(config.embedding)
    machine = None
    if time:
        common.remark("measuring this machine's limits")
        machine = measure_machine(dtype, device)
    found = cost(
        config,
        batch=batch,
        length=length,
        source_length=source_length,
        prefix_length=prefix_length,
        dtype=dtype,
        mode=mode,
        optimizer=optimizer,
        loss=loss,
        recomputation=recomputation,
        attention=attention,
        device=device,
        devices=devices,
        shard=shard,
        machine=machine,
    )
    fitting = None if limit is None else fit(config, found.work, limit)
    answer = {"target": target, **found.to_dict(), "fit": fitting}
    if json:
        common.emit(answer)
    else:
        from isoform.report import cost as report
        from isoform.report import terminal

        report.show(terminal.console(), common.plain(answer))
    return 0 if fitting is None or fitting.fits else 1


def _usual(table: Embedding) -> int:
    """What a length is where none is given."""
    positions = table.positions
    return min(LENGTH, positions.max_positions) if positions.kind == "learned" else LENGTH


def size(text: str) -> int:
    """Bytes of ``24GiB``, ``80 GB``, ``1.5MiB`` or a bare number.

    Raises:
        ConfigError: something else.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = next((u for u in UNITS if found is not None and u.lower() == found[2].lower()), None)
    if found is None or unit is None:
        raise ConfigError(f"--memory {text!r}: expected a number and a unit, e.g. 24GiB or 80GB")
    return int(float(found[1]) * UNITS[unit])
