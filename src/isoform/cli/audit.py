"""``isoform audit``."""

from __future__ import annotations

from typing import Annotated

import typer

from isoform.cli import common, subjects


def command(
    target: common.TargetName,
    inputs: subjects.InputsOption = None,
    promise: Annotated[
        str | None,
        typer.Option(help="causal, prefix or bidirectional; unset: read off the model.", show_default=False),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Positions that every layer reads; unset: read off the configuration.",
            show_default=False,
        ),
    ] = None,
    check: Annotated[
        list[str] | None, typer.Option("--check", help="Only this check; may be repeated.")
    ] = None,
    compiled: Annotated[bool, typer.Option("--compiled", help="Also compare with torch.compile.")] = False,
    seed: Annotated[int, typer.Option(help="Of the contents that are exchanged.")] = 0,
    html: subjects.Html = None,
    json: common.Json = False,
) -> int:
    """Does one model keep its promises: causality, padding, cache, masks, norms, ties, loss.

    Exit status 1: a check fails. What could not be run is "not checked", never "passed".
    """
    from isoform.errors import ConfigError
    from isoform.verify import audit

    if promise not in (None, "causal", "prefix", "bidirectional"):
        raise ConfigError(f"--promise: {promise!r}; expected causal, prefix or bidirectional")
    module = subjects.subject(target)
    report = audit(
        module,
        subjects.inputs(module, inputs),
        promise=promise,  # type: ignore[arg-type]
        window=window,
        checks=check,
        compiled=compiled,
        seed=seed,
    )
    if html is not None:
        from isoform.report import verification

        verification.audit_page(report, command=f"isoform audit {target}").write(html)
        common.remark(f"wrote {html}")
    if json:
        common.emit({"target": target, **report.to_dict()})
    else:
        print(report)
    return 0 if report.passed else 1
