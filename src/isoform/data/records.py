"""What the readers return: one small immutable record for each line, object or document."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, TypeVar, cast


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """A text and what it is to become."""

    source: str
    target: str


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """Plain text."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Labelled:
    """A text and its class."""

    text: str
    label: str


@dataclasses.dataclass(frozen=True, slots=True)
class Tagged:
    """Words and the tag of each."""

    words: tuple[str, ...]
    tags: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Prompted:
    """A condition and the answer to it (6.33)."""

    prompt: str
    answer: str


Record = Pair | Document | Labelled | Tagged | Prompted
R = TypeVar("R", bound=Record, covariant=True)


def columns(items: Sequence[Record]) -> dict[str, list[str]]:
    """The texts that records of one kind consist of, by side; words are joined by spaces."""
    if not items:
        return {}
    if isinstance(items[0], Pair):
        pairs = cast("Sequence[Pair]", items)
        return {"source": [r.source for r in pairs], "target": [r.target for r in pairs]}
    if isinstance(items[0], Prompted):
        prompted = cast("Sequence[Prompted]", items)
        return {"prompt": [r.prompt for r in prompted], "answer": [r.answer for r in prompted]}
    if isinstance(items[0], Tagged):
        return {"text": [" ".join(r.words) for r in cast("Sequence[Tagged]", items)]}
    return {"text": [r.text for r in cast("Sequence[Document | Labelled]", items)]}


def labels(items: Sequence[Record]) -> dict[str, int]:
    """How often each label or tag stands in records; nothing for those without."""
    return dict(
        collections.Counter(
            label
            for record in items
            for label in (
                (record.label,)
                if isinstance(record, Labelled)
                else record.tags
                if isinstance(record, Tagged)
                else ()
            )
        )
    )


@dataclasses.dataclass(frozen=True)
class Records(Generic[R]):
    """The records of one part of the data, each with the place it was read from.

    Attributes:
        name: ``"train"``, ``"validation"`` or ``"test"``.
        items: the records.
        lines: line number of each record, from 1 (of a TMX file, the number of the unit).
        files: where they were read from; empty for a built-in corpus.
    """

    name: str
    items: Sequence[R]
    lines: Sequence[int]
    files: tuple[Path, ...] = ()

    def __len__(self) -> int:
        return len(self.items)

    def where(self, index: int) -> str:
        """Where a record came from, for messages."""
        if not self.files:
            return f"{self.name}, record {self.lines[index]}"
        names = " and ".join(str(file) for file in self.files)
        return f"{names}, line {self.lines[index]}"

    def select(self, indices: Sequence[int], name: str) -> Records[R]:
        """Some of the records, under the name of another part."""
        items = [self.items[i] for i in indices]
        return Records(name, items, [self.lines[i] for i in indices], self.files)
