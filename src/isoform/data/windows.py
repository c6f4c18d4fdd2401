"""Windows of running text: drawn at random to train, laid end to end to evaluate."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from isoform.data.batching import Batch, BucketReport, shift_right
from isoform.data.batching_config import Windows
from isoform.data.buckets import INSIDE
from isoform.data.ragged import Ints, Ragged, to_tokens
from isoform.errors import DataError


class RandomWindows:
    """Windows starting anywhere, drawn with replacement; each batch from a generator of its own.

    An epoch is as many batches as it takes to draw as many ids as the text has.

    Args:
        text: ``[N]`` the ids of the whole text.
        windows: length T and batch size.
        seed: decides the draws together with epoch and batch.
        where: what the text is, for messages.

    Raises:
        DataError: the text is not longer than a window.
    """

    def __init__(self, text: NDArray[np.int32], *, windows: Windows, seed: int, where: str) -> None:
        _refuse_short(text, windows.length, where)
        self._text, self._windows, self._seed = text, windows, seed

    def count(self, epoch: int) -> int:
        """How many batches an epoch has."""
        return -(-len(self._text) // (self._windows.length * self._windows.batch_size))

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from the given one on."""
        length, size = self._windows.length, self._windows.batch_size
        for index in range(start, self.count(epoch)):
            generator = np.random.default_rng([self._seed, epoch, INSIDE, index])
            starts = generator.integers(len(self._text) - length, size=size)
            windows = Ragged(self._text, starts, np.full(size, length + 1))
            yield _batch(windows, np.arange(size), starts)

    def report(self, epoch: int) -> BucketReport:
        """Nothing is padded."""
        batches = self.count(epoch)
        rows = batches * self._windows.batch_size
        return BucketReport(batches, rows, rows * self._windows.length, 0)

    def largest(self) -> Batch:
        """The first batch: all are of one size."""
        return next(self.epoch(0))


class SequentialWindows:
    """Windows laid end to end, so that every id is predicted exactly once (but the very first one, which
    nothing precedes). The last window may be shorter.

    Args:
        text: ``[N]`` the ids of the whole text.
        windows: length T and batch size.
        where: what the text is, for messages.

    Raises:
        DataError: the text has fewer than two ids.
    """

    def __init__(self, text: NDArray[np.int32], *, windows: Windows, where: str) -> None:
        _refuse_short(text, 1, where)
        self._windows = windows
        starts = np.arange(0, len(text) - 1, windows.length)
        # A window's ids are its first input and its labels: one more than it predicts.
        self._rows = Ragged(text, starts, np.minimum(windows.length + 1, len(text) - starts))

    def count(self, epoch: int) -> int:
        """How many batches there are; the same in every epoch."""
        return -(-len(self._rows) // self._windows.batch_size)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches, from the given one on."""
        size = self._windows.batch_size
        for index in range(start, self.count(epoch)):
            rows = np.arange(index * size, min((index + 1) * size, len(self._rows)))
            yield _batch(self._rows, rows, self._rows.starts[rows])

    def report(self, epoch: int) -> BucketReport:
        """Only the last window may be padded."""
        real, padding = int((self._rows.lengths - 1).sum()), 0
        last = self._rows.lengths[(self.count(epoch) - 1) * self._windows.batch_size :]
        padding = int((last.max() - last).sum())
        return BucketReport(self.count(epoch), len(self._rows), real, padding)

    def largest(self) -> Batch:
        """The first batch: no other is larger."""
        return next(self.epoch(0))


def _batch(windows: Ragged, rows: Ints, starts: Ints) -> Batch:
    ids, real = (torch.from_numpy(part) for part in windows.pad(rows, 0))
    inputs, labels = shift_right(ids[:, 1:], ids[:, 0])
    real = real[:, 1:]
    return Batch(to_tokens(inputs, real), labels, real, rows=torch.from_numpy(starts))


def _refuse_short(text: NDArray[np.int32], length: int, where: str) -> None:
    if len(text) <= length:
        raise DataError(
            f"{where}: {len(text)} tokens; a window of {length} needs {length + 1}, one to predict from"
        )
