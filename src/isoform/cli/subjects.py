"""What ``audit``, ``compare`` and ``diagnose`` share: modules out of TARGETs, and their inputs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isoform.cli import common
from isoform.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from isoform.verify import Recording

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


def subject_or_recording(name: str) -> nn.Module | Recording:
    """Likewise, or a recording from a ``.safetensors`` file that `isoform.verify.record` wrote."""
    if name.endswith(".safetensors") and Path(name).is_file() and _is_recording(name):
        from isoform.verify import Recording

        return Recording.load(name)
    return subject(name)


def inputs(module: Any, given: str | None) -> Any:
    """Inputs of a module: from the user's function, or by its signature.

    Raises:
        ConfigError: the function fails.
    """
    from isoform.verify import Recording, example_inputs

    if isinstance(module, Recording):
        return None
    if given is None:
        return example_inputs(module)
    made = common.load_factory(given)
    try:
        return made()
    except Exception as error:
        raise ConfigError(f"{given} failed with {type(error).__name__}: {error}") from error


def pair(a: str, b: str, given: str | None, other: str | None) -> tuple[Any, Any, Any, Any]:
    """Two subjects and their inputs; those of the first serve both where their arguments have equal names."""
    import inspect

    first, second = subject_or_recording(a), subject_or_recording(b)
    from isoform.verify import Recording

    ours = inputs(first, given)
    if other is not None:
        theirs = inputs(second, other)
    elif isinstance(second, Recording):
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
