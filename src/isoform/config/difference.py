"""What separates two configurations, field by field and in words."""

from __future__ import annotations

import dataclasses
from typing import Any

from isoform.config.base import Frozen

# Why a field matters, for the sentence. Keyed by the field's last name; only those that change the function.
_MEANING = {
    "placement": "where the norm stands relative to the residual sum",
    "residual": "whether attention and feed-forward act in sequence or in parallel",
    "final_norm": "the norm at the end of the stack",
    "activation": "the non-linearity",
    "eps": "the constant inside the root of the norm",
    "gain_offset": "whether the norm multiplies by w or by 1 + w",
    "layout": "which channels form a pair",
    "theta": "the rotary base frequency",
    "scale": "a constant factor",
    "softcap": "the tanh cap on scores or logits",
    "window": "how far back a query reads",
    "visibility": "who may read whom",
    "tied": "whether the output matrix is the embedding table",
    "n_kv_heads": "how many key/value heads the queries share",
    "offset": "the number of the first position",
    "kind": "the kind of part",
    "router_order": "the order of softmax, choice and normalisation in the router",
    "residual_scale": "a factor on every residual increment, forward and backward",
}


@dataclasses.dataclass(frozen=True)
class Difference:
    """One field that differs. ``a`` and ``b`` are plain values; `Absent` where one side has no such field."""

    path: str
    a: Any
    b: Any

    @property
    def sentence(self) -> str:
        """The difference in words."""
        meaning = _MEANING.get(self.path.rsplit(".", 1)[-1])
        why = f" ({meaning})" if meaning else ""
        return f"{self.path}{why}: {_show(self.a)} in the first, {_show(self.b)} in the second"


class Absent:
    """Stands for a field that one side does not have."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = Absent()


def difference(a: Frozen, b: Frozen) -> tuple[Difference, ...]:
    """Every field in which two configurations differ, in the order of the configuration."""
    return tuple(_walk("", a.model_dump(), b.model_dump()))


def _walk(path: str, a: Any, b: Any) -> list[Difference]:
    if a == b and type(a) is type(b):
        return []
    if isinstance(a, dict) and isinstance(b, dict):
        if a.get("kind") != b.get("kind"):
            return [Difference(path, a, b)]
        keys = list(dict.fromkeys([*a, *b]))
        return [
            d for k in keys for d in _walk(f"{path}.{k}" if path else k, a.get(k, ABSENT), b.get(k, ABSENT))
        ]
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in _walk(f"{path}[{i}]", x, y)]
    return [] if a == b else [Difference(path, a, b)]


def _show(value: Any) -> str:
    if isinstance(value, dict):
        inner = ", ".join(f"{k} {_show(v)}" for k, v in value.items() if k != "kind" and v is not None)
        return (
            f"{value['kind']} ({inner})"
            if "kind" in value and inner
            else str(value.get("kind", f"({inner})"))
        )
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
