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
        ConfigError: the function fails, or ``forward`` does on what it gave.
    """
    from isoform.verify import Dump, Recording, example_inputs

    if isinstance(module, Recording | Dump):
        return None
    if given is None:
        return example_inputs(module)
    made = common.called(given, common.load_factory(given))
    common.called(f"forward of {type(module).__name__}, with what {given} gave,", lambda: _run(module, made))
    return made


def pair(
    a: str, b: str, given: str | None, other: str | None, *, dumps: bool = False
) -> tuple[Any, Any, Any, Any]:
    """Two subjects and their inputs.

    Those of the first serve both where their arguments have equal names, and where one reads `Tokens` and the
    other ``input_ids`` and ``attention_mask``.
    """
    first, second = operand(a, dumps=dumps), operand(b, dumps=dumps)
    from isoform.verify import Dump, Recording

    ours = inputs(first, given)
    if other is not None:
        theirs = inputs(second, other)
    elif isinstance(second, Recording | Dump):
        theirs = None
    elif ours is not None and (not isinstance(ours, dict) or _takes(second, ours)):
        theirs = ours
    elif isinstance(ours, dict) and _takes(second, turned := _in_the_other_form(ours)):
        theirs = turned
    elif isinstance(ours, dict) and _takes_any(second):
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


def _takes(module: nn.Module, arguments: dict[str, Any]) -> bool:
    """Whether ``forward`` has all of these names; Hugging Face's leave some to what they call."""
    import inspect

    parameters = inspect.signature(module.forward).parameters
    left = "input_ids" in arguments and _takes_any(module)
    return bool(arguments) and (set(arguments) <= set(parameters) or left)


def _takes_any(module: nn.Module) -> bool:
    import inspect

    parameters = inspect.signature(module.forward).parameters.values()
    return any(p.kind is p.VAR_KEYWORD for p in parameters)


def _in_the_other_form(arguments: dict[str, Any]) -> dict[str, Any]:
    """`Tokens` as ids and masks, or ids and masks as `Tokens`; empty where there is more than these can say.

    Hugging Face's source is the ``input_ids`` of a call that has ``decoder_input_ids``, ours is ``source``.
    """
    from isoform.tokens import Tokens

    names = ("decoder_input_ids", "decoder_attention_mask"), ("input_ids", "attention_mask")
    if "input_ids" in arguments and set(arguments) <= {name for pair in names for name in pair}:
        made = [_tokens(arguments[ids], arguments.get(mask)) for ids, mask in names if ids in arguments]
        return dict(zip(("tokens", "source"), made, strict=False))
    more = ("documents", "prefix", "token_types", "position_ids")
    plain = all(
        isinstance(tokens, Tokens) and all(getattr(tokens, name) is None for name in more)
        for tokens in arguments.values()
    )
    if not plain or not {"tokens"} <= set(arguments) <= {"tokens", "source"}:
        return {}
    sides = names if "source" in arguments else names[1:]
    return {
        name: value
        for side, (ids, mask) in zip(("tokens", "source"), sides, strict=False)
        for name, value in ((ids, arguments[side].ids), (mask, arguments[side].real_or_ones().long()))
    }


def _tokens(ids: Any, mask: Any) -> Any:
    from isoform.tokens import Tokens

    return Tokens(ids) if mask is None else Tokens(ids, mask.bool())


def _run(module: nn.Module, made: Any) -> None:
    import torch

    with torch.no_grad():
        module(**made) if isinstance(made, dict) else module(*made)


def _is_recording(name: str) -> bool:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(name, "pt") as file:
            return "isoform.recording" in (file.metadata() or {})
    except SafetensorError:
        return False
