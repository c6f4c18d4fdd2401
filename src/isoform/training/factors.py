"""One factor of an experiment: a setting, the values it takes, and the run that each of them makes (R17)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from isoform.config import ModelConfig, difference
from isoform.config.base import Frozen, parse
from isoform.config.difference import Difference
from isoform.config.files import read_table
from isoform.config.parts import ActivationName, Gated, Norm, TwoLayer
from isoform.config.stack import Stack
from isoform.cost import equal_budget_width
from isoform.errors import ConfigError, did_you_mean
from isoform.training.config import PresetModel, Pretrained, RunConfig, Vocabularies
from isoform.training.overrides import apply_overrides, put, toml_value

STACKS = ("encoder", "decoder")
GATES = {
    "glu": "sigmoid",
    "reglu": "relu",
    "geglu": "gelu",
    "swiglu": "silu",
    "bilinear": "identity",
}
WIDTH_MULTIPLE = 8  # of a gated width that is to cost what a two-layer one does
OTHER_FIGURES = ("data.", "tokenizer.", "evaluation.", "training.masking")
ANY_SIZE = 64  # rows of tables before there are tokenizers: nothing that is varied depends on it


@dataclasses.dataclass(frozen=True)
class Factor:
    """A setting and the values it is to take.

    Attributes:
        key: a name in the run file (``training.label_smoothing``), the end of a name in the network
            (``feed_forward.activation``: wherever it stands), or one of `COMPOSED`.
        values: what it takes, one run each.
    """

    key: str
    values: tuple[Any, ...]


def parse_factor(text: str) -> Factor:
    """Read ``key=value,value,…``; commas inside brackets and quotes separate nothing.

    Raises:
        ConfigError: no key or no value, or a value twice.
    """
    key, sign, rest = text.partition("=")
    values = [toml_value(part) for part in _split(rest)]
    if not sign or not key.strip() or not all(part.strip() for part in _split(rest)):
        raise ConfigError(f"--vary {text!r}: expected key=value,value,…")
    if any(value in values[:i] for i, value in enumerate(values)):
        raise ConfigError(f"--vary {text!r}: a value stands there twice")
    return Factor(key.strip(), tuple(values))


def varied(
    path: Path, overrides: Sequence[str], base: RunConfig, key: str, value: Any, *, matched: bool
) -> tuple[RunConfig, tuple[Difference, ...]]:
    """The run in which one setting has another value, and what that changes.

    Args:
        path: the run file.
        overrides: those that made the base.
        base: the run that the setting is changed in.
        key: see `Factor`.
        value: what it is to be.
        matched: whether a gated network is made as wide as costs what the two-layer one did (R10).

    Raises:
        ConfigError: no such setting, no such value, or more than one setting changes with it (R17).
    """
    if key == "training.seed":
        raise ConfigError("--vary training.seed: seeds are no factor; every value is run with all of --seeds")
    if key.startswith(OTHER_FIGURES):
        raise ConfigError(f"--vary {key}: other data or tokens have another NLL, which cannot be compared")
    network = expanded(base)
    if key.partition(".")[0] in RunConfig.model_fields:
        table = put(apply_overrides(read_table(path), overrides), key.split("."), value, key)
        run = parse(RunConfig, table, where=str(path))
        found = (
            *difference(network, expanded(run)),
            *difference(base.model_copy(update={"model": run.model}), run),
        )
        fields = dict.fromkeys(d.path.rpartition(".")[2] for d in found)
        if len(fields) > 1:
            places = ", ".join(d.path for d in found)
            raise ConfigError(f"{key}={value} changes {len(fields)} settings at once: {places}; vary one")
        return run, found
    if key in COMPOSED:
        changes = dict(COMPOSED[key](network, key, value, matched))
    else:
        places = _places(network, key)
        changes = dict.fromkeys(places, value)
    run = _changed(base, changes)
    found = difference(network, expanded(run))
    if strange := [d.path for d in found if not d.path.startswith(tuple(changes))]:
        raise ConfigError(f"{key}={value} also changes {', '.join(strange)}; vary one setting")
    return run, found


def expanded(run: RunConfig) -> ModelConfig:
    """The network of a run file, with tables of some size where only the tokenizers know it."""
    if isinstance(run.model, Pretrained):
        raise ConfigError(
            "model.checkpoint: factors are varied from random weights on, not from trained ones"
        )
    if isinstance(run.model, ModelConfig):
        return run.model
    given = run.model.arguments
    size = given.get("vocab_size", ANY_SIZE)
    sizes = Vocabularies(
        target=size,
        source=given.get("source_vocab_size", size),
        shared=run.tokenizer is not None and run.tokenizer.shared is not None,
        labels=2,
    )
    return run.model.expand(sizes)


def _changed(run: RunConfig, changes: dict[str, Any]) -> RunConfig:
    if isinstance(run.model, PresetModel):
        return run.replace(**{"model.change": {**run.model.flat_change(), **changes}})
    return run.replace(**{f"model.{path}": value for path, value in changes.items()})


def _places(network: ModelConfig, key: str) -> list[str]:
    """Every dotted name in the network that ends in the key."""
    names = list(_names(network.model_dump(mode="json")))
    found = [name for name in names if f".{name}".endswith(f".{key}")]
    if not found:
        ends = {".".join(name.split(".")[-2:]) for name in names} | set(COMPOSED)
        raise ConfigError(
            f"--vary {key}: neither a setting of the run file nor of the network{did_you_mean(key, ends)}"
        )
    return found


def _names(node: Any, above: str = "") -> Iterator[str]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, value in items:
        yield f"{above}{name}"
        yield from _names(value, f"{above}{name}.")


def _stacks(network: ModelConfig) -> Iterator[tuple[str, Stack]]:
    for name, stack in (("encoder", network.encoder), ("decoder", network.decoder)):
        if stack is not None:
            yield name, stack


def _placement(network: ModelConfig, key: str, value: Any, matched: bool) -> Iterator[tuple[str, Any]]:
    """With the norm that ends a stack: Post-LN has none, every other placement needs one (R15)."""
    for name, stack in _stacks(network):
        norm = None if value == "post" else stack.final_norm or stack.layer.norm
        yield f"{name}.layer.placement", value
        yield f"{name}.final_norm", "none" if norm is None else norm.model_dump()


def _norm_kind(network: ModelConfig, key: str, value: Any, matched: bool) -> Iterator[tuple[str, Any]]:
    """Of every norm, with its bias, which an RMSNorm does not have."""
    for path, norm in _norms(network):
        bias = value == "layer" and (norm.bias if norm.kind == "layer" else norm.gain)
        yield path, {**norm.model_dump(), "kind": value, "bias": bias}


def _norms(part: Frozen, above: str = "") -> Iterator[tuple[str, Norm]]:
    for name in type(part).model_fields:
        value = getattr(part, name)
        if isinstance(value, Norm):
            yield f"{above}{name}", value
        elif isinstance(value, Frozen):
            yield from _norms(value, f"{above}{name}.")


def _feed_forward(network: ModelConfig, key: str, value: Any, matched: bool) -> Iterator[tuple[str, Any]]:
    """A form by its name: an activation between two layers, or a gate (6.9)."""
    if key == "feed_forward" and value not in (*GATES, *get_args(ActivationName)):
        known = [*GATES, *get_args(ActivationName)]
        raise ConfigError(f"--vary feed_forward={value}: no such form{did_you_mean(str(value), known)}")
    if key == "feed_forward.kind" and value not in ("two_layer", "gated"):
        raise ConfigError(f"--vary feed_forward.kind={value}: expected two_layer or gated")
    for name, stack in _stacks(network):
        if stack.variants:
            raise ConfigError(f"--vary {key}: {name} has variants, whose feed-forward networks differ")
        now = stack.layer.feed_forward
        if not isinstance(now, TwoLayer | Gated):
            raise ConfigError(f"--vary {key}: {name} has experts; vary feed_forward.expert.activation")
        gated = value == "gated" or value in GATES
        activation = now.activation if key == "feed_forward.kind" else GATES.get(value, value)
        yield f"{name}.layer.feed_forward", _form(now, gated, activation, matched).model_dump()


def _form(now: TwoLayer | Gated, gated: bool, activation: Any, matched: bool) -> TwoLayer | Gated:
    plain: dict[str, Any] = {"activation": activation, "bias_down": now.bias_down, "bias_up": now.bias_up}
    width = now.width
    if matched and gated != isinstance(now, Gated):
        width = equal_budget_width(width, WIDTH_MULTIPLE).nearest if gated else round(1.5 * width)
    if gated:
        bias = now.bias_gate if isinstance(now, Gated) else now.bias_up
        return Gated(width=width, bias_gate=bias, dropout=now.dropout, **plain)
    return TwoLayer(width=width, dropout=now.dropout, **plain)


Composed = Callable[[ModelConfig, str, Any, bool], Iterator[tuple[str, Any]]]
COMPOSED: dict[str, Composed] = {
    "norm.placement": _placement,
    "norm.kind": _norm_kind,
    "feed_forward": _feed_forward,
    "feed_forward.kind": _feed_forward,
}
"""One decision of the field that stands in several fields of a configuration."""


def _split(text: str) -> list[str]:
    parts, depth, quoted = [""], 0, False
    for letter in text:
        quoted ^= letter == '"'
        depth += 0 if quoted else (letter in "[{") - (letter in "]}")
        if letter == "," and not depth and not quoted:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
