"""``isoform check``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isoform.cli import common
from isoform.cli.train import DataFolder, Overrides


def command(
    target: Annotated[
        Path,
        typer.Argument(metavar="CONFIG|ARTIFACT", help="A run file, or an artifact.", show_default=False),
    ],
    overrides: Overrides = None,
    data: DataFolder = None,
    json: common.Json = False,
) -> int:
    """Preflight of a run: the data's counts, faults, lengths and samples, one step on its largest batch.

    For an artifact: its golden probe again, held against what was recorded when it was saved.

    Exit status 1: the artifact computes something else than it did.
    """
    if target.is_dir():
        return _artifact(target, json)
    from isoform.errors import DataError
    from isoform.report import preflight as report
    from isoform.report import terminal
    from isoform.training import check, data_folder, inspect_data, read_run

    run = read_run(target, overrides or ())
    base = data_folder(target) if data is None else data
    looked = inspect_data(run, base=base)
    faults = looked.preflight.problems
    if faults:
        # All faults at once on stdout; the first is the line of the error.
        answer = looked.preflight.to_dict()
        common.emit(answer) if json else report.data(terminal.console(), answer)
        raise DataError(faults[0])
    found = check(run, base=base, tokenizers=looked.tokenizers)
    if json:
        common.emit(found.to_dict())
    else:
        report.run(terminal.console(), found.to_dict())
    return 0


def _artifact(folder: Path, json: bool) -> int:
    from isoform.checkpoints import load
    from isoform.errors import CheckError

    try:
        bundle = load(folder, check=True)
    except CheckError as error:
        if json:
            common.emit({"artifact": folder, "ok": False, "statement": str(error)})
        else:
            common.remark(str(error))
        return 1
    report = bundle.report
    assert report is not None
    if json:
        common.emit({"artifact": folder, "ok": True, "probe": report})
    else:
        print("\n".join(report.lines()))
    return 0
