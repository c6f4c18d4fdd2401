"""``isoform diagnose``."""

from __future__ import annotations

from typing import Annotated

import typer

from isoform.cli import common, subjects


def command(
    reference: Annotated[
        str, typer.Argument(metavar="A", help="A TARGET or a recording.", show_default=False)
    ],
    candidate: Annotated[str, typer.Argument(metavar="B", help="Likewise.", show_default=False)],
    inputs: subjects.InputsOption = None,
    candidate_inputs: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:FUNCTION", help="The same content in B's form.", show_default=False),
    ] = None,
    probe: Annotated[bool, typer.Option(help="Also look for what these weights hide.")] = True,
    html: subjects.Html = None,
    json: common.Json = False,
) -> int:
    """Why two models part, every cause by name.

    Exit status 1: they differ.
    """
    from isoform.verify import compare, diagnose

    a, b, ours, theirs = subjects.pair(reference, candidate, inputs, candidate_inputs)
    found = diagnose(a, b, ours, theirs, probe=probe)
    if html is not None:
        from isoform.report import verification

        line = f"isoform diagnose {reference} {candidate}"
        verification.diagnosis_page(found, compare(a, b, ours, theirs), command=line).write(html)
        common.remark(f"wrote {html}")
    if json:
        common.emit(found.to_dict())
    else:
        print(found)
    return 1 if found.verdict == "differs" else 0
