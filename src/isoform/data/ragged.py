"""Rows of unequal length in one flat array, padded by a vectorised copy."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from isoform.tokens import Tokens

Ints = NDArray[np.int64]


@dataclasses.dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of ids.

    Attributes:
        flat: all ids, int32. Rows may overlap.
        starts: ``[N]`` where each row begins in ``flat``.
        lengths: ``[N]`` how many ids each row has.
    """

    flat: NDArray[np.int32]
    starts: Ints
    lengths: Ints

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[int]]) -> Ragged:
        """Store lists one after the other."""
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        flat = np.fromiter(itertools.chain.from_iterable(rows), np.int32, int(lengths.sum()))
        return cls(flat, np.cumsum(lengths) - lengths, lengths)

    @classmethod
    def concatenate(cls, parts: Iterable[Ragged]) -> Ragged:
        """The rows of several, in order."""
        found = list(parts)
        shift = np.cumsum([0, *(len(part.flat) for part in found)])
        return cls(
            np.concatenate([part.flat for part in found]),
            np.concatenate([part.starts + offset for part, offset in zip(found, shift, strict=False)]),
            np.concatenate([part.lengths for part in found]),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def row(self, index: int) -> list[int]:
        """One row."""
        start = self.starts[index]
        return self.flat[start : start + self.lengths[index]].tolist()

    def select(self, rows: Ints | NDArray[np.bool_]) -> Ragged:
        """Some rows, without copying ids."""
        return Ragged(self.flat, self.starts[rows], self.lengths[rows])

    def around(self, before: Sequence[int], after: Sequence[int]) -> Ragged:
        """The rows with some ids put before and after each."""
        if not before and not after:
            return self
        lengths = self.lengths + len(before) + len(after)
        starts = np.cumsum(lengths) - lengths
        flat = np.empty(int(lengths.sum()), np.int32)
        flat[_places(starts + len(before), self.lengths)] = self.compact()
        for place, number in enumerate(before):
            flat[starts + place] = number
        for place, number in enumerate(after):
            flat[starts + len(before) + self.lengths + place] = number
        return Ragged(flat, starts, lengths)

    def join(self, other: Ragged) -> Ragged:
        """Each row followed by the other's row."""
        both = Ragged.concatenate([self, other])
        count = len(self)
        order = np.arange(2 * count).reshape(2, count).T.ravel()  # self 0, other 0, self 1, other 1, …
        lengths = self.lengths + other.lengths
        return Ragged(both.select(order).compact(), np.cumsum(lengths) - lengths, lengths)

    def compact(self) -> NDArray[np.int32]:
        """The ids of all rows, one row after the other."""
        return self.flat[_places(self.starts, self.lengths)]

    def cut(self, length: int) -> Ragged:
        """The first ``length`` ids of each row."""
        return Ragged(self.flat, self.starts, np.minimum(self.lengths, length))

    def pad(self, rows: Ints, fill: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The rows as a rectangle, padded on the right.

        Returns:
            ``[B, T]`` ids and ``[B, T]`` True where an id is real.
        """
        lengths = self.lengths[rows]
        columns = np.arange(int(lengths.max(initial=0)))
        real = columns < lengths[:, None]
        ids = np.full(real.shape, fill, dtype=np.int64)
        ids[real] = self.flat[(self.starts[rows][:, None] + columns)[real]]
        return ids, real

    def tokens(self, rows: Ints, fill: int) -> Tokens:
        """The rows as `Tokens`, padded on the right."""
        ids, real = self.pad(rows, fill)
        return to_tokens(torch.from_numpy(ids), torch.from_numpy(real))


def _places(starts: Ints, lengths: Ints) -> Ints:
    """Where every id of rows lies in a flat array, row after row."""
    inner = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.repeat(starts, lengths) + inner


def to_tokens(
    ids: torch.Tensor,
    real: torch.Tensor,
    *,
    prefix: torch.Tensor | None = None,
    documents: torch.Tensor | None = None,
) -> Tokens:
    """Right-padded tokens, told to be full where nothing is padded."""
    if bool(real.all()):
        return Tokens(ids, prefix=prefix, documents=documents, layout="full")
    return Tokens(ids, real, prefix=prefix, documents=documents, layout="right")
