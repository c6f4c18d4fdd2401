"""The base of every configuration: frozen, and refusing what it does not know."""

from __future__ import annotations

import functools
from typing import Annotated, Any, Optional, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.json_schema import GetJsonSchemaHandler
from pydantic_core import CoreSchema
from typing_extensions import Self

from isoform.config.faults import report
from isoform.errors import ConfigError, did_you_mean

T = TypeVar("T")
C = TypeVar("C", bound="Frozen")


# A field that must be written even when it is absent, by the word "none".
Nullable = Optional[T]  # noqa: UP045 - an alias that takes a type

# Numbers and switches are read as written: the text "8", or true where a count belongs, is a fault.
Flag = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(strict=True, gt=0)]
Index = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[float, Field(strict=True, gt=0)]
NonNegative = Annotated[float, Field(strict=True, ge=0)]
Dropout = Annotated[float, Field(strict=True, ge=0.0, lt=1.0)]


class Frozen(BaseModel):
    """An immutable record. Unknown keys, wrong types and contradictions are errors."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        ser_json_inf_nan="constants",
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _unset(cls, data: Any) -> Any:
        """The word "none" unsets what may be unset: TOML and settings on the command line have no null.

        Where "none" is a choice of its own it stays one.
        """
        if not isinstance(data, dict) or "none" not in (v for v in data.values() if isinstance(v, str)):
            return data
        optional = _optional(cls)
        return {key: None if value == "none" and key in optional else value for key, value in data.items()}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core)
        known = handler.resolve_ref_schema(schema).get("properties", {})
        for name in _optional(cls) & known.keys():
            choices = known[name].get("anyOf", [])
            if {"const": "none"} not in choices:
                choices.append({"const": "none"})
        return schema

    def replace(self, **changes: Any) -> Self:
        """A validated copy with some fields changed; nested fields by dotted or ``__`` separated names.

        ``config.replace(decoder__layer__placement="pre")`` is the whole of a one-factor change (R17).
        Entries of a list go by their number: ``decoder.variants.0.attention.window``.

        Raises:
            ConfigError: a name that does not exist, or a result that contradicts itself.
        """
        data = self.model_dump()
        for name, value in changes.items():
            path = name.replace("__", ".").split(".")
            plain = value.model_dump() if isinstance(value, BaseModel) else value
            data = _changed(data, path, plain, name)
        return parse(type(self), data)


@functools.cache
def _optional(kind: type[Frozen]) -> frozenset[str]:
    """The fields that may be None and of which "none" is no value."""
    return frozenset(
        name
        for name, field in kind.model_fields.items()
        if type(None) in get_args(field.annotation)
        and not any("none" in get_args(choice) for choice in get_args(field.annotation))
    )


def parse(kind: type[C], data: Any, *, where: str = "") -> C:
    """Validate plain data into a configuration.

    Args:
        kind: the configuration class.
        data: nested dicts, as read from TOML, YAML or JSON.
        where: what the data came from (a file's name), put in front of the message.

    Raises:
        ConfigError: one line with up to five faults, each with the path to the key.
    """
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        prefix = f"{where}: " if where else ""
        raise ConfigError(prefix + report(kind, error)) from None


def _changed(node: Any, path: list[str], value: Any, name: str) -> Any:
    step, rest = path[0], path[1:]
    if isinstance(node, tuple):
        if not step.isdigit() or int(step) >= len(node):
            raise ConfigError(f"{name}: no entry {step!r}; there are {len(node)}, counted from 0")
        i = int(step)
        return (*node[:i], _changed(node[i], rest, value, name) if rest else value, *node[i + 1 :])
    if not isinstance(node, dict):
        raise ConfigError(f"{name}: {node!r} has no field {step!r}")
    if rest and step not in node:
        raise ConfigError(f"{name}: no field {step!r}{did_you_mean(step, node)}")
    if rest and node[step] is None:
        raise ConfigError(f"{name}: {step} is not set, so it has no field {rest[0]!r}")
    return {**node, step: _changed(node[step], rest, value, name) if rest else value}
