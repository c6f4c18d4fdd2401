"""What separates two configurations, field by field and in words."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Any, cast

from isoform.config import phrases
from isoform.config.base import Frozen
from isoform.config.model import ModelConfig
from isoform.config.subjects import PLACES, SUBJECTS


@dataclasses.dataclass(frozen=True)
class Difference:
    """One field that differs.

    Args:
        path: the field, as it is written in a file.
        a: the first side's plain value; a dict for a whole part, when the two parts are of another kind.
        b: the second side's.
        place: where the field stands, in words ("decoder self-attention").
        subject: what the field says ("rotary theta").
        first: the first side's value in words.
        second: the second side's.
    """

    path: str
    a: Any
    b: Any
    place: str
    subject: str
    first: str
    second: str

    @property
    def sentence(self) -> str:
        """The difference in words."""
        return _sentence([self.place], self)


def difference(a: Frozen, b: Frozen) -> tuple[Difference, ...]:
    """Every field in which two configurations differ, in the order of the configuration.

    Parts of another kind (rotary and ALiBi, LayerNorm and RMSNorm) are one difference.
    """
    both = isinstance(a, ModelConfig) and a.structure == "encoder-decoder"
    return tuple(_walk("", a, b, None, both))


def difference_in_words(a: Frozen, b: Frozen) -> list[str]:
    """The differences as sentences; one that repeats itself, say in encoder and decoder, is said once."""
    groups: dict[tuple[Any, ...], list[Difference]] = {}
    for item in difference(a, b):
        field = item.path.rpartition(".")[2]
        groups.setdefault((field, item.subject, item.first, item.second), []).append(item)
    return [_sentence([item.place for item in group], group[0]) for group in groups.values()]


def _sentence(places: Iterable[str], item: Difference) -> str:
    where = [place for place in dict.fromkeys(places) if place]
    subject = f"{item.subject} " if item.subject else ""
    text = f"{subject}{item.first} in the first, {item.second} in the second"
    return f"{phrases.listed(where)}: {text}" if where else text


def _walk(path: str, a: Any, b: Any, owner: Frozen | None, both: bool) -> Iterable[Difference]:
    if a == b and type(a) is type(b):
        return
    if isinstance(a, Frozen) and type(a) is type(b) and _kind(a) == _kind(b):
        for name in type(a).model_fields:
            inner = f"{path}.{name}" if path else name
            yield from _walk(inner, getattr(a, name), getattr(b, name), a, both)
        return
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b) and _parts(a) and _parts(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _walk(f"{path}[{i}]", x, y, owner, both)
        return
    if isinstance(a, dict) and isinstance(b, dict):
        ours, theirs = cast("dict[str, Any]", a), cast("dict[str, Any]", b)
        for name in dict.fromkeys((*ours, *theirs)):
            yield from _walk(f"{path}.{name}", ours.get(name), theirs.get(name), owner, both)
        return
    above, _, field = path.rpartition(".")
    known = SUBJECTS.get(type(owner).__name__, {}).get(field.partition("[")[0])
    subject, say = known or ("" if owner is None else field, phrases.part)
    place = _place(above, both) if known else above
    yield Difference(path, _plain(a), _plain(b), place, subject, _say(say, a), _say(say, b))


def _kind(value: Frozen) -> str | None:
    return dict(value).get("kind")


def _parts(value: tuple[Any, ...]) -> bool:
    return all(isinstance(item, Frozen) for item in value)


def _say(say: Callable[[Any], str], value: Any) -> str:
    return "none" if value is None else say(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Frozen):
        return value.model_dump()
    return tuple(_plain(item) for item in value) if isinstance(value, tuple) else value


def _place(path: str, both: bool) -> str:
    """ "decoder.layer.attention.positions" as "decoder self-attention positions"."""
    words: list[str] = []
    for step in path.split(".") if path else []:
        name, number = re.fullmatch(r"(\w+?)(?:\[(\d+)\])?", step).groups()  # pyright: ignore[reportOptionalMemberAccess]
        word = PLACES.get(name, name)
        if name == "embedding" and both:
            word = "target embedding"
        words.append(f"{word} {number}" if number else word)
    if len(words) > 2 and words[1] == "layers":
        del words[1]  # "decoder self-attention" says enough
    return " ".join(word for word in words if word)
