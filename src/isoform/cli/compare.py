"""``isoform compare``."""

from __future__ import annotations

from typing import Annotated

import typer

from isoform.cli import common, subjects


def command(
    reference: Annotated[
        str,
        typer.Argument(metavar="A", help="A TARGET, a recording, or named arrays.", show_default=False),
    ],
    candidate: Annotated[str, typer.Argument(metavar="B", help="Likewise.", show_default=False)],
    inputs: subjects.InputsOption = None,
    candidate_inputs: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:FUNCTION", help="The same content in B's form.", show_default=False),
    ] = None,
    backward: Annotated[bool, typer.Option("--backward", help="Gradients too.")] = False,
    html: subjects.Html = None,
    json: common.Json = False,
) -> int:
    """Where two models first part, in the order of the dataflow, against measured rounding.

    Exit status 1: they differ.
    """
    from isoform.verify import compare

    a, b, ours, theirs = subjects.pair(reference, candidate, inputs, candidate_inputs, dumps=True)
    found = compare(a, b, ours, theirs, backward=backward)
    if html is not None:
        from isoform.report import verification

        line = f"isoform compare {reference} {candidate}"
        verification.comparison_page(found, command=line).write(html)
        common.remark(f"wrote {html}")
    if json:
        common.emit(found.to_dict())
    else:
        print(found)
    return 1 if found.verdict == "differs" else 0
