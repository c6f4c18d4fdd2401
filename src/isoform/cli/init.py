"""``isoform init``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from isoform.cli import common
from isoform.errors import ConfigError

Kind = Literal["translation", "language-model", "prefix", "classification", "tagging", "masked"]


def command(
    kind: Annotated[Kind, typer.Argument(help="What is to be learnt.")] = "translation",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to; KIND.toml if unset.")
    ] = None,
    json: common.Json = False,
) -> None:
    """Write a run file to start from, every setting commented. An existing file is never overwritten."""
    from isoform.config.files import write_text

    path = Path(f"{kind}.toml") if output is None else output
    if path.suffix != ".toml":
        raise ConfigError(f"{path}: the starter is TOML, give it a name that ends in .toml")
    if path.exists():
        raise ConfigError(f"{path}: exists already; give another name with --output")
    write_text(path, starter(kind).replace(f"{kind}.toml", path.name))
    if json:
        common.emit({"kind": kind, "file": path})
    else:
        print(f"{path} written. Put in your files, then: isoform check {path}")


def starter(kind: Kind) -> str:
    """The text of a starter."""
    from importlib.resources import files

    return (files("isoform.cli") / "starters" / f"{kind}.toml").read_text(encoding="utf-8")
