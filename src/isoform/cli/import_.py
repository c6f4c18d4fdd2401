"""``isoform import``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from isoform.cli import common


def command(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A folder with config.json and weights, a CTranslate2 folder, a GGUF file, "
            "or a llama2.c .bin file.",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The artifact to write.", show_default=False)],
    dtype: Annotated[
        Literal["float64", "float32", "bfloat16", "float16"] | None,
        typer.Option(help="What to store the weights in; as they are if unset.", show_default=False),
    ] = None,
    unpickle: Annotated[
        bool,
        typer.Option("--unpickle", help="Read pytorch_model.bin, tensors only, if there is nothing else."),
    ] = False,
    json: common.Json = False,
) -> None:
    """Turn a checkpoint of a known family into an artifact, and check that nothing was lost.

    The checkpoint's tensors are made again from the network and compared bit for bit; the artifact is opened
    again and its golden probe re-run.
    """
    import torch

    from isoform.checkpoints import load
    from isoform.checkpoints.loading import unchanged
    from isoform.config import difference_in_words

    kind = None if dtype is None else getattr(torch, dtype)
    bundle = load(source, dtype=kind, unpickle=unpickle)
    checks: dict[str, Any] = {}
    if kind is None and (count := unchanged(bundle, source, unpickle=unpickle)) is not None:
        checks["tensors_bit_equal"] = count
    provenance = {**bundle.provenance, "import_check": checks}
    dataclasses.replace(bundle, provenance=provenance).save(output)
    again = load(output, check=True)
    assert again.report is not None
    assert not difference_in_words(again.config, bundle.config)
    if json:
        common.emit(
            {"artifact": output, "family": bundle.provenance.get("family"), **checks, "probe": again.report}
        )
        return
    if checks:
        print(f"{checks['tensors_bit_equal']} tensors come back bit for bit")
    print("\n".join(again.report.lines()))
    print(f"wrote {output}")
