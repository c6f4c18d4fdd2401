"""``isoform export``."""

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
    to: Annotated[
        Literal["hf", "torch", "ctranslate2", "onnx"],
        typer.Option(
            help="hf, the layout of the transformers library; torch, for torch.nn.Transformer; ctranslate2; "
            "onnx."
        ),
    ] = "hf",
    family: Annotated[
        str | None,
        typer.Option(
            help="The model_type to write; the one it was imported as, else the first that fits.",
            show_default=False,
        ),
    ] = None,
    json: common.Json = False,
) -> None:
    """Write an artifact in another format, and check the result by opening it again.

    A configuration that the format cannot express is refused, with the first field that it cannot say.
    """
    from isoform.checkpoints import export, load
    from isoform.checkpoints.checked import Checked

    export(load(source), output, to=to, family=family)
    report = Checked.read(output)
    if json:
        common.emit({"folder": output, "format": to, "check": report})
        return
    print("\n".join(report.lines()))
    print(f"wrote {output}")
