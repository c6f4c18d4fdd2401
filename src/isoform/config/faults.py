"""Validation errors as one readable line, each fault under the path its author wrote."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from isoform.errors import did_you_mean

SHOWN = 5


class _Place(NamedTuple):
    """Where a fault is: the author's path, the class whose keys were read, what the last key should hold."""

    path: str
    owner: type[BaseModel] | None
    annotation: Any


def report(kind: type[BaseModel], error: ValidationError) -> str:
    """The faults of one validation, at most five, the rest counted."""
    grouped: dict[str, list[tuple[_Place, ErrorDetails]]] = {}
    for fault in error.errors(include_url=False):
        place = _locate(kind, fault["loc"])
        grouped.setdefault(place.path, []).append((place, fault))
    order = sorted(grouped.values(), key=lambda group: group[0][1]["type"] == "missing")
    guessed = {_guess(place, fault) for group in grouped.values() for place, fault in group}
    lines = [
        _line(group)
        for group in order
        # a key that was meant by a misspelt one is not missing
        if not (group[0][1]["type"] == "missing" and group[0][0].path in guessed)
    ]
    more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return "; ".join(lines[:SHOWN]) + more


def _line(group: Sequence[tuple[_Place, ErrorDetails]]) -> str:
    place, fault = group[0]
    given = fault["input"]
    context = fault.get("ctx", {})
    if fault["type"] == "extra_forbidden":
        known = list(place.owner.model_fields) if place.owner is not None else []
        return f"{place.path}: unknown key{did_you_mean(str(fault['loc'][-1]), known)}"
    if fault["type"] == "missing":
        names = _literals(place.annotation)
        return f"{place.path}: required, and never implied{_choice(names)}"
    if fault["type"] == "union_tag_not_found":
        return f"{_sub(place.path, 'kind')}: required, and never implied{_choice(_tags(place.annotation))}"
    if fault["type"] == "union_tag_invalid":
        return _unknown_name(_sub(place.path, "kind"), context["tag"], _tags(place.annotation))
    if fault["type"] == "literal_error" and len(group) == 1:
        return _unknown_name(place.path, given, _literals(place.annotation))
    if fault["type"] == "value_error":
        message = str(context.get("error", fault["msg"]))
        return f"{place.path}: {message}" if place.path else message
    if fault["type"] in ("model_type", "model_attributes_type"):
        return f"{place.path or 'configuration'}: expected a table of settings{_shown(given)}"
    wanted = [f["msg"].removeprefix("Input should be ") for _, f in group]
    return f"{place.path}: should be {' or '.join(dict.fromkeys(wanted))}{_shown(given)}"


def _unknown_name(path: str, given: Any, names: list[str]) -> str:
    hint = did_you_mean(str(given), names)
    hint = hint if hint.startswith("; did you mean") else ""
    return f"{path}: {given!r} is not one of {', '.join(names)}{hint}"


def _guess(place: _Place, fault: ErrorDetails) -> str:
    if fault["type"] != "extra_forbidden" or place.owner is None:
        return ""
    hint = did_you_mean(str(fault["loc"][-1]), place.owner.model_fields)
    if not hint.startswith("; did you mean"):
        return ""
    return _sub(place.path.rpartition(".")[0], hint.split("'")[1])


def _locate(kind: type[BaseModel], loc: Sequence[int | str]) -> _Place:
    """Drop the names of union members from a validation path, by following the annotations along it."""
    path, owner, annotation = "", None, kind
    for step in loc:
        models = _models(annotation)
        named = {_tag(model): model for model in models} | {model.__name__: model for model in models}
        if len(models) > 1:
            if step in named:
                annotation = named[str(step)]
            continue
        if len(models) == 1 and isinstance(step, str):
            owner = models[0]
            path = _sub(path, step)
            field = owner.model_fields.get(step)
            annotation = field.annotation if field is not None else None
        elif isinstance(step, int):
            path += f"[{step}]"
            annotation = next(iter(_items(annotation)), None)
        elif _origin(annotation) is dict:
            path, annotation = _sub(path, step), _items(annotation)[-1]
        elif annotation is None:
            path = _sub(path, step)
    return _Place(path, owner, annotation)


def _sub(path: str, step: str) -> str:
    return f"{path}.{step}" if path else step


def _origin(annotation: Any) -> Any:
    return get_origin(annotation)


def _members(annotation: Any) -> list[Any]:
    """The members of a union, `Annotated` taken off."""
    if _origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if _origin(annotation) in (Union, types.UnionType):
        return [m for part in get_args(annotation) for m in _members(part)]
    return [annotation]


def _models(annotation: Any) -> list[type[BaseModel]]:
    return [m for m in _members(annotation) if isinstance(m, type) and issubclass(m, BaseModel)]


def _items(annotation: Any) -> list[Any]:
    return [a for m in _members(annotation) for a in get_args(m) if a is not ...]


def _literals(annotation: Any) -> list[str]:
    """The names a field may hold, where names are all it may hold."""
    members = [m for m in _members(annotation) if m is not type(None)]
    if any(_origin(m) is not Literal for m in members):
        return []
    return [str(v) for m in members for v in get_args(m)]


def _tag(model: type[BaseModel]) -> str:
    field = model.model_fields.get("kind")
    return str(get_args(field.annotation)[0]) if field is not None else model.__name__


def _tags(annotation: Any) -> list[str]:
    return [_tag(model) for model in _models(annotation)]


def _choice(names: list[str]) -> str:
    return f"; one of {', '.join(names)}" if names else ""


def _shown(given: Any) -> str:
    return f", got {given!r}" if isinstance(given, str | int | float | bool | type(None)) else ""
