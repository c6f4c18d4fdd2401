"""Settings given on the command line, put into the tables of a run file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from isoform.errors import ConfigError


def apply_overrides(table: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The table with ``dotted.name=value`` settings applied; tables on the way are made.

    Raises:
        ConfigError: a setting without "=" or without a name, or one that leads through a plain value.
    """
    for text in overrides:
        name, sign, value = text.partition("=")
        path = name.strip().split(".")
        if not sign or not all(path):
            raise ConfigError(f"override {text!r}: expected dotted.name=value")
        table = put(table, path, toml_value(value.strip()), text)
    return table


def put(table: dict[str, Any], path: list[str], value: Any, text: str) -> dict[str, Any]:
    """A copy of nested tables with a value at the end of a path; ``text`` says where it comes from.

    Raises:
        ConfigError: the path leads through a plain value.
    """
    step, rest = path[0], path[1:]
    if not rest:
        return {**table, step: value}
    inner = table.get(step, {})
    if isinstance(inner, list) and rest[0].isdigit() and int(rest[0]) < len(inner):
        items = list(inner)
        index = int(rest[0])
        items[index] = value if len(rest) == 1 else put(items[index], rest[1:], value, text)
        return {**table, step: items}
    if not isinstance(inner, dict):
        raise ConfigError(f"override {text!r}: {step} is {inner!r}, which has no {rest[0]!r}")
    return {**table, step: put(inner, rest, value, text)}


def toml_value(text: str) -> Any:
    """A value in TOML's notation; what is none is a text."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # pyright: ignore[reportMissingImports]
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
