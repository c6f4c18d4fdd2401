"""The base of every configuration: frozen, and refusing what it does not know."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from isoform.errors import ConfigError, did_you_mean

T = TypeVar("T")
# A field that must be written even when it is absent. TOML has no null, so the word "none" says it too.
Nullable = Annotated[T | None, BeforeValidator(lambda value: None if value == "none" else value)]


class Frozen(BaseModel):
    """An immutable record. Unknown keys, wrong types and contradictions are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="constants")

    def replace(self, **changes: Any) -> Any:
        """A validated copy with some fields changed; nested fields by dotted or ``__`` separated names.

        ``config.replace(decoder__layer__placement="pre")`` is the whole of a one-factor change (R17).
        """
        data = self.model_dump()
        for name, value in changes.items():
            *path, last = name.replace("__", ".").split(".")
            node = data
            for step in path:
                if not isinstance(node, dict) or step not in node:
                    raise ConfigError(f"{name}: no field {step!r}{did_you_mean(step, _names(node))}")
                node = node[step]
            if not isinstance(node, dict):
                raise ConfigError(f"{name}: {'.'.join(path)} is not set, so it has no field {last!r}")
            node[last] = value.model_dump() if isinstance(value, BaseModel) else value
        return parse(type(self), data)


def parse(kind: type[Frozen], data: Any, *, where: str = "") -> Any:
    """Validate plain data into a configuration; every fault becomes one line of a `ConfigError`.

    Args:
        kind: the configuration class.
        data: nested dicts, as read from TOML, YAML or JSON.
        where: what the data came from (a file's name), put in front of the message.
    """
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        lines = [_line(kind, fault) for fault in error.errors(include_url=False)]
        prefix = f"{where}: " if where else ""
        raise ConfigError(prefix + "; ".join(dict.fromkeys(lines))) from None


def _line(kind: type[BaseModel], fault: ErrorDetails) -> str:
    path = [str(step) for step in fault["loc"]]
    place = ".".join(path) or kind.__name__
    if fault["type"] == "extra_forbidden":
        parent = _resolve(kind, path[:-1])
        known = list(parent.model_fields) if parent is not None else []
        return f"{place}: unknown key{did_you_mean(path[-1], known)}"
    if fault["type"] == "missing":
        return f"{place}: required, and never implied"
    if fault["type"] in ("literal_error", "union_tag_invalid"):
        expected = str(fault.get("ctx", {}).get("expected") or fault.get("ctx", {}).get("expected_tags", ""))
        names = [name.strip(" '") for name in expected.replace(" or ", ", ").split(",")]
        given = fault["input"]
        if fault["type"] == "union_tag_invalid":
            given = fault.get("ctx", {}).get("tag", "")
            place += ".kind"
        return f"{place}: {given!r} is not one of {', '.join(names)}{_nearest(str(given), names)}"
    if fault["type"] == "value_error":
        message = str(fault.get("ctx", {}).get("error", fault["msg"]))
        return f"{place}: {message}" if path else message
    given = fault["input"]
    shown = f", got {given!r}" if isinstance(given, str | int | float | bool | type(None)) else ""
    return f"{place}: {fault['msg'][0].lower()}{fault['msg'][1:]}{shown}"


def _nearest(word: str, names: list[str]) -> str:
    hint = did_you_mean(word, names)
    return hint if hint.startswith("; did you mean") else ""


def _resolve(kind: type[BaseModel], path: list[str]) -> type[BaseModel] | None:
    """Follow a validation path through the annotations to the class whose keys were being read."""
    from typing import get_args

    current: type[BaseModel] | None = kind
    pending: list[Any] = []
    for step in path:
        if current is not None and step in current.model_fields:
            pending = _classes(current.model_fields[step].annotation, get_args)
            current = pending[0] if len(pending) == 1 else None
            continue
        tagged = [
            c for c in pending if step in (getattr(c.model_fields.get("kind"), "default", None), c.__name__)
        ]
        tagged += (
            [c for c in pending if step in get_args(c.model_fields["kind"].annotation)] if not tagged else []
        )
        if tagged:
            current = tagged[0]
        elif not step.isdigit():
            return None
        elif len(pending) == 1:
            current = pending[0]
    return current


def _classes(annotation: Any, get_args: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [c for part in get_args(annotation) for c in _classes(part, get_args)]


def _names(node: Any) -> list[str]:
    return list(node) if isinstance(node, dict) else []
