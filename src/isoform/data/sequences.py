"""Batches for next-token prediction: pairs, prompts and answers, documents, packed documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from isoform.data.batching import Batch, BucketReport, Position, shift_right
from isoform.data.batching_config import Packed, TokenBudget
from isoform.data.buckets import ORDER, Bucketed
from isoform.data.encode import EncodedPairs, EncodedPrompts, EncodedTexts
from isoform.data.ragged import Ints, to_tokens
from isoform.errors import DataError

Where = Callable[[int], str]


def pair_batches(
    pairs: EncodedPairs,
    *,
    start_id: int,
    source_pad: int,
    target_pad: int,
    budget: TokenBudget,
    seed: int | None,
    where: Where,
) -> Bucketed[Batch]:
    """Source and shifted target (Algorithm 6.1). Every target id, its EOS included, is supervised.

    Args:
        pairs: the encoded pairs.
        start_id: what the decoder reads first.
        source_pad: what fills up rows of the source.
        target_pad: what fills up rows of the target.
        budget: tokens a batch, both sides, padding included.
        seed: orders the batches; None for evaluation, in order of length.
        where: the place a record was read from.
    """

    def assemble(rows: Ints, position: Position) -> Batch:
        ids, real = (torch.from_numpy(part) for part in pairs.target.pad(rows, target_pad))
        inputs, labels = shift_right(ids, start_id)
        return Batch(
            decoder_input=to_tokens(inputs, real),
            labels=labels,
            supervised=real,
            rows=torch.from_numpy(pairs.fit.kept[rows]),
            source=pairs.source.tokens(rows, source_pad),
        )

    lengths = (pairs.source.lengths, pairs.target.lengths)
    return Bucketed(
        lengths=lengths, assemble=assemble, budget=budget, seed=seed, where=_kept(where, pairs.fit.kept)
    )


def prompt_batches(
    prompts: EncodedPrompts, *, pad: int, budget: TokenBudget, seed: int | None, where: Where
) -> Bucketed[Batch]:
    """Prompt and answer in one row (6.33). Supervised are the positions that predict the answer: the last
    of the prompt and those after it; the others of the prompt would see what they predict (R23)."""

    def assemble(rows: Ints, position: Position) -> Batch:
        ids, real = (torch.from_numpy(part) for part in prompts.tokens.pad(rows, pad))
        inputs, labels = shift_right(ids[:, 1:], ids[:, 0])
        prefix = torch.from_numpy(prompts.prefix[rows])
        answers = torch.arange(labels.shape[1]) >= prefix[:, None] - 1
        # The last real id of a row is only ever predicted, so the input is real where its label is.
        return Batch(
            decoder_input=to_tokens(inputs, real[:, 1:], prefix=prefix),
            labels=labels,
            supervised=answers & real[:, 1:],
            rows=torch.from_numpy(prompts.fit.kept[rows]),
        )

    lengths = (prompts.tokens.lengths - 1,)
    return Bucketed(
        lengths=lengths, assemble=assemble, budget=budget, seed=seed, where=_kept(where, prompts.fit.kept)
    )


def document_batches(
    texts: EncodedTexts, *, start_id: int, pad: int, budget: TokenBudget, seed: int | None, where: Where
) -> Bucketed[Batch]:
    """One document a row, the start token before it; every id of the document is supervised."""

    def assemble(rows: Ints, position: Position) -> Batch:
        ids, real = (torch.from_numpy(part) for part in texts.tokens.pad(rows, pad))
        inputs, labels = shift_right(ids, start_id)
        kept = torch.from_numpy(texts.fit.kept[rows])
        return Batch(decoder_input=to_tokens(inputs, real), labels=labels, supervised=real, rows=kept)

    lengths = (texts.tokens.lengths,)
    return Bucketed(
        lengths=lengths, assemble=assemble, budget=budget, seed=seed, where=_kept(where, texts.fit.kept)
    )


class PackedDocuments:
    """Whole documents side by side in rows of one length, told apart by `Tokens.documents` (R21).

    Documents are shuffled and laid down in turn; one that does not fit opens a new row. ``Batch.rows``
    names the first document of each row.

    Args:
        texts: the encoded documents.
        start_id: stands before each document.
        pad: fills up rows.
        packing: length of a row and rows a batch.
        seed: orders the documents together with the epoch; None keeps their order.
        where: the place a record was read from.

    Raises:
        DataError: a document longer than a row.
    """

    def __init__(
        self, texts: EncodedTexts, *, start_id: int, pad: int, packing: Packed, seed: int | None, where: Where
    ) -> None:
        lengths = texts.tokens.lengths
        if lengths.max(initial=0) > packing.length:
            worst = int(lengths.argmax())
            raise DataError(
                f"{where(int(texts.fit.kept[worst]))}: {int(lengths[worst])} tokens,"
                f" longer than a packed row of {packing.length}"
            )
        self._texts, self._start, self._pad, self._packing, self._seed = texts, start_id, pad, packing, seed
        self._plan: tuple[int, Ints, Ints] | None = None

    def count(self, epoch: int) -> int:
        """How many batches an epoch has."""
        return -(-(len(self._rows(epoch)[1]) - 1) // self._packing.batch_size)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from the given one on."""
        (order, starts), size = self._rows(epoch), self._packing.batch_size
        for index in range(start, -(-(len(starts) - 1) // size)):
            ends = starts[index * size : (index + 1) * size + 1]
            yield self._assemble(order[ends[0] : ends[-1]], np.diff(ends))

    def report(self, epoch: int) -> BucketReport:
        """How well the epoch's rows are filled."""
        rows, real = len(self._rows(epoch)[1]) - 1, int(self._texts.tokens.lengths.sum())
        return BucketReport(self.count(epoch), rows, real, rows * self._packing.length - real)

    def largest(self) -> Batch:
        """The first batch: all are of one size, but for the last."""
        return next(self.epoch(0))

    def _rows(self, epoch: int) -> tuple[Ints, Ints]:
        """The documents in their order, and where in it each row begins; at last where the last one ends."""
        key, kept = 0 if self._seed is None else epoch, self._plan
        if kept is None or kept[0] != key:
            count = len(self._texts.tokens)
            order = np.arange(count)
            if self._seed is not None:
                order = np.random.default_rng([self._seed, epoch, ORDER]).permutation(count)
            kept = self._plan = key, order, _pack(self._texts.tokens.lengths[order], self._packing.length)
        return kept[1:]

    def _assemble(self, documents: Ints, members: Ints) -> Batch:
        """The batch of documents, so many of them in each row."""
        texts, length, rows = self._texts.tokens, self._packing.length, len(members)
        sizes = texts.lengths[documents]
        row = np.repeat(np.arange(rows), members)
        number = np.concatenate([np.arange(count) for count in members])
        before = np.cumsum(sizes) - sizes
        column = before - before[np.searchsorted(row, row)]  # where each document starts in its row
        ids, real = texts.pad(documents, self._pad)
        inputs, labels = shift_right(torch.from_numpy(ids), self._start)
        # Places of all ids: document by document, as boolean indexing reads the padded rectangle.
        at = (
            np.repeat(row, sizes),
            np.concatenate([np.arange(s) + c for s, c in zip(sizes, column, strict=True)]),
        )
        shape = (rows, length)
        placed = {name: np.full(shape, self._pad, dtype=np.int64) for name in ("inputs", "labels")}
        placed["inputs"][at], placed["labels"][at] = inputs.numpy()[real], labels.numpy()[real]
        # Padding goes on counting as the row's last document, so that no new one seems to begin there.
        segment = np.repeat((members - 1)[:, None], length, axis=1)
        filled = np.zeros(shape, dtype=bool)
        segment[at], filled[at] = np.repeat(number, sizes), True
        mask = torch.from_numpy(filled)
        first = self._texts.fit.kept[documents[np.cumsum(members) - members]]
        return Batch(
            decoder_input=to_tokens(
                torch.from_numpy(placed["inputs"]), mask, documents=torch.from_numpy(segment)
            ),
            labels=torch.from_numpy(placed["labels"]),
            supervised=mask,
            rows=torch.from_numpy(first),
        )


def _pack(sizes: Ints, length: int) -> Ints:
    """Where each row of at most ``length`` ids begins, and where the last one ends."""
    ends = np.cumsum(sizes)
    starts, filled = [0], 0
    while starts[-1] < len(sizes):
        starts.append(int(np.searchsorted(ends, filled + length, side="right")))
        filled = int(ends[starts[-1] - 1])
    return np.array(starts)


def _kept(where: Where, kept: Ints) -> Where:
    return lambda row: where(int(kept[row]))
