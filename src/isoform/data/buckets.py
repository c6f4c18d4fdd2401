"""Batches filled to a number of tokens from rows of similar length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np

from isoform.data.batching import BucketReport, Position
from isoform.data.batching_config import TokenBudget
from isoform.data.ragged import Ints
from isoform.errors import DataError

B = TypeVar("B")
ORDER, INSIDE = 0, 1  # what a seeded generator is for: the order of batches, or choices inside one


def plan_batches(
    lengths: Sequence[Ints], budget: TokenBudget, generator: np.random.Generator | None
) -> list[Ints]:
    """Group rows so that rows × (longest of each side, added up) stays within the budget.

    Rows are shuffled and dealt into pools; in each pool they are sorted by target length, then by source
    length, up and down in turn, so that neighbours stay alike where the target length changes; consecutive
    rows fill a batch; the batches are shuffled. Without a generator there is one pool and no shuffling.

    Args:
        lengths: ``[N]`` ids a row, for each side (source first).
        budget: the number of padded tokens, and the pool's size.
        generator: where the order comes from; None for evaluation.
    """
    count = len(lengths[0])
    order = np.arange(count) if generator is None else generator.permutation(count)
    pool = count if generator is None else budget.pool
    plan: list[Ints] = []
    for start in range(0, count, max(pool, 1)):
        rows = order[start : start + pool]
        rows = rows[np.lexsort(_keys([side[rows] for side in lengths]))]  # stable: ties stay shuffled
        plan += _fill(rows, [side[rows].tolist() for side in lengths], budget.max_tokens)
    if generator is not None:
        plan = [plan[i] for i in generator.permutation(len(plan))]
    return plan


def _keys(lengths: list[Ints]) -> list[Ints]:
    *source, target = lengths
    return [np.where(target % 2 == 0, side, -side) for side in source] + [target]


def _fill(rows: Ints, lengths: list[list[int]], limit: int) -> list[Ints]:
    found: list[Ints] = []
    first, longest = 0, [0] * len(lengths)
    for index, sizes in enumerate(zip(*lengths, strict=True)):
        grown = [max(pair) for pair in zip(longest, sizes, strict=True)]
        if index > first and (index - first + 1) * sum(grown) > limit:
            found.append(rows[first:index])
            first, grown = index, list(sizes)
        longest = grown
    if first < len(rows):
        found.append(rows[first:])
    return found


class Bucketed(Generic[B]):
    """The batches of one part of the data, by token budget; see `Batches`.

    Args:
        lengths: ``[N]`` ids a row, for each side (source first, target last).
        assemble: makes the batch of some rows; the position is for seeded choices inside a batch.
        budget: tokens and pool.
        seed: orders the batches together with the epoch; None: always in order of length.
        where: the place a row was read from, for messages.

    Raises:
        DataError: a row that exceeds the budget alone.
    """

    def __init__(
        self,
        *,
        lengths: Sequence[Ints],
        assemble: Callable[[Ints, Position], B],
        budget: TokenBudget,
        seed: int | None,
        where: Callable[[int], str],
    ) -> None:
        total = np.sum(lengths, axis=0)
        if len(total) and total.max() > budget.max_tokens:
            worst = int(total.argmax())
            raise DataError(
                f"{where(worst)}: {int(total[worst])} tokens, more than a whole batch of max_tokens ="
                f" {budget.max_tokens}"
            )
        self._lengths, self._assemble, self._budget, self._seed = lengths, assemble, budget, seed
        self._plan: tuple[int, list[Ints]] | None = None

    def plan(self, epoch: int) -> list[Ints]:
        """The rows of each batch of an epoch."""
        key, kept = 0 if self._seed is None else epoch, self._plan
        if kept is None or kept[0] != key:
            generator = None if self._seed is None else np.random.default_rng([self._seed, epoch, ORDER])
            kept = self._plan = key, plan_batches(self._lengths, self._budget, generator)
        return kept[1]  # not self._plan: another thread may have planned another epoch

    def count(self, epoch: int) -> int:
        """How many batches an epoch has."""
        return len(self.plan(epoch))

    def epoch(self, epoch: int, start: int = 0) -> Iterator[B]:
        """The batches of an epoch, from the given one on."""
        plan = self.plan(epoch)
        for index in range(start, len(plan)):
            yield self._assemble(plan[index], Position(epoch, index))

    def report(self, epoch: int) -> BucketReport:
        """How well the epoch's batches are filled."""
        plan = self.plan(epoch)
        real = sum(int(side[rows].sum()) for rows in plan for side in self._lengths)
        total = sum(_size(rows, self._lengths) for rows in plan)
        return BucketReport(len(plan), sum(map(len, plan)), real, total - real)

    def largest(self) -> B:
        """The batch of epoch 0 with the most ids, padding included."""
        plan = self.plan(0)
        index = max(range(len(plan)), key=lambda i: _size(plan[i], self._lengths))
        return self._assemble(plan[index], Position(0, index))


def _size(rows: Ints, lengths: Sequence[Ints]) -> int:
    return len(rows) * sum(int(side[rows].max()) for side in lengths)
