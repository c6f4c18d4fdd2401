"""What ``audit``, ``compare`` and ``diagnose`` share: modules out of TARGETs, and their inputs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isoform.cli import common
from isoform.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from isoform.verify import Dump, Recording

InputsOption = Annotated[
    str | None,
    typer.Option(
        "--inputs",
        metavar="FILE.py:FUNCTION",
        help="A function that gives the inputs of forward: a dict of keyword arguments, or a tuple. "
        "Unset: made from the signature.",
        show_default=False,
    ),
]
Html = Annotated[
    Path | None, typer.Option("--html", help="Also write a report as one HTML file.", show_default=False)
]


def subject(name: str) -> nn.Module:
    """The module behind a TARGET; a configuration is built with seed 0.

    Raises:
        ConfigError: no such target.
    """
    found = common.resolve(name)
    if found.model is not None:
        return found.model
    from isoform.nn import build

    common.remark(f"{name}: a configuration without weights; they are drawn with seed 0")
    return build(found.architecture(), seed=0)


def operand(name: str, *, dumps: bool = False) -> nn.Module | Recording | Dump:
    """Likewise, or a recording from a ``.safetensors`` file that `isoform.verify.record` wrote.

    Args:
        name: a TARGET or a file.
        dumps: another framework's named arrays serve too.

    Raises:
        ConfigError: arrays that are no recording, where they do not serve.
    """
    if name.endswith((".safetensors", ".npz")) and Path(name).is_file():
        from isoform.verify import Recording, read_dump

        if name.endswith(".safetensors") and _is_recording(name):
            return Recording.load(name)
        if dumps:
            return read_dump(name)
        raise ConfigError(
            f"{name}: not a recording; arrays without their dataflow can be compared, not diagnosed"
        )
    return subject(name)


def inputs(module: Any, given: str | None) -> Any:
    """Inputs of a module: from the user's function, or by its signature.

    Raises:
        ConfigError: the function fails.
    """
    from isoform.verify import Dump, Recording, example_inputs

    if isinstance(module, Recording | Dump):
        return None
    if given is None:
        return example_inputs(module)
    made = common.load_factory(given)
    try:
        return made()
    except Exception as error:
        raise ConfigError(f"{given} failed with {type(error).__name__}: {error}") from error


def pair(
    a: str, b: str, given: str | None, other: str | None, *, dumps: bool = False
) -> tuple[Any, Any, Any, Any]:
    """Two subjects and their inputs; those of the first serve both where their arguments have equal names."""
    import inspect

    first, second = operand(a, dumps=dumps), operand(b, dumps=dumps)
    from isoform.verify import Dump, Recording

    ours = inputs(first, given)
    if other is not None:
        theirs = inputs(second, other)
    elif isinstance(second, Recording | Dump):
        theirs = None
    elif ours is not None and (
        not isinstance(ours, dict) or set(ours) <= set(inspect.signature(second.forward).parameters)
    ):
        theirs = ours
    elif ours is None:
        raise ConfigError(
            f"{b}: with a recording, give the inputs that were recorded with --candidate-inputs"
        )
    else:
        raise ConfigError(
            f"{b}: its forward does not take {', '.join(ours)}; give the same content in its form with "
            "--candidate-inputs FILE.py:FUNCTION"
        )
    return first, second, ours, theirs


def _is_recording(name: str) -> bool:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(name, "pt") as file:
            return "isoform.recording" in (file.metadata() or {})
    except SafetensorError:
        return False
