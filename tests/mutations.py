"""Every single-field change of a configuration that still validates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from isoform.config import Frozen
from isoform.errors import ConfigError

Change = tuple[str, str, Frozen]


def mutations(config: Frozen) -> Iterator[Change]:
    """("Norm.eps", "decoder.layer.norm.eps", the changed configuration), for each field that can change."""
    for owner, path, value, annotation in _leaves(config, ""):
        for other in (other for other in _others(value, annotation) if other != value):
            try:
                yield (
                    f"{type(owner).__name__}.{path.rpartition('.')[2]}",
                    path,
                    config.replace(**{path: other}),
                )
            except ConfigError:
                continue
            break


def _leaves(part: Frozen, path: str) -> Iterator[tuple[Frozen, str, Any, Any]]:
    for name, field in type(part).model_fields.items():
        value = getattr(part, name)
        inner = f"{path}.{name}".strip(".")
        items = value if isinstance(value, tuple) and value and isinstance(value[0], BaseModel) else None
        if isinstance(value, Frozen):
            yield from _leaves(value, inner)
        elif items is not None:
            for i, item in enumerate(items):
                yield from _leaves(item, f"{inner}.{i}")
        elif name != "kind" or type(part).__name__ == "Norm":
            yield part, inner, value, field.annotation


def _others(value: Any, annotation: Any) -> list[Any]:
    names = [v for a in (annotation, *get_args(annotation)) if get_origin(a) is Literal for v in get_args(a)]
    others: list[Any] = [name for name in names if name != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [*others, value + 1, value + 2, value - 1, value - 2]
    if isinstance(value, float) or float in get_args(annotation):
        number = value if isinstance(value, float) else 1.0
        return [number * 1.0000001 + 1e-9, number + 1.0, *others]
    if isinstance(value, tuple) and value and isinstance(value[0], int):
        return [value[:-1], tuple(range(len(value))), tuple(i + 1 for i in value)]
    if isinstance(value, tuple) and value and isinstance(value[0], float):
        return [(*value[:-1], value[-1] + 1.0)]
    if isinstance(value, str) and not names:
        return [value + "2"]
    return [*others, 3, 2.5]
