"""Batches for encoders: classes of texts, tags of words, masked tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from isoform.data.batching import LabelledBatch, Position
from isoform.data.batching_config import Masking, TokenBudget
from isoform.data.buckets import INSIDE, Bucketed
from isoform.data.encode import EncodedLabels, EncodedTags, EncodedTexts
from isoform.data.ragged import Ints, to_tokens
from isoform.data.tokenizer import Tokenizer

Where = Callable[[int], str]


def class_batches(
    data: EncodedLabels, *, pad: int, budget: TokenBudget, seed: int | None, where: Where
) -> Bucketed[LabelledBatch]:
    """Texts with one label each."""

    def assemble(rows: Ints, position: Position) -> LabelledBatch:
        labels = torch.from_numpy(data.labels[rows])
        return LabelledBatch(
            data.tokens.tokens(rows, pad),
            labels,
            torch.ones_like(labels, dtype=torch.bool),
            rows=torch.from_numpy(data.fit.kept[rows]),
        )

    return _bucketed(data.tokens.lengths, assemble, budget, seed, where, data.fit.kept)


def tag_batches(
    data: EncodedTags, *, pad: int, budget: TokenBudget, seed: int | None, where: Where
) -> Bucketed[LabelledBatch]:
    """Words with a tag each; supervised at the first id of a word."""

    def assemble(rows: Ints, position: Position) -> LabelledBatch:
        tags = torch.from_numpy(data.tags.pad(rows, -1)[0])
        return LabelledBatch(
            data.tokens.tokens(rows, pad),
            tags.clamp(min=0),
            tags >= 0,
            rows=torch.from_numpy(data.fit.kept[rows]),
        )

    return _bucketed(data.tokens.lengths, assemble, budget, seed, where, data.fit.kept)


def masked_batches(
    data: EncodedTexts,
    tokenizer: Tokenizer,
    *,
    masking: Masking,
    pad: int,
    budget: TokenBudget,
    seed: int,
    shuffle: bool,
    where: Where,
) -> Bucketed[LabelledBatch]:
    """Texts some of whose ids are to be recovered (Devlin et al. 2019, §3.1).

    What is masked is decided by seed, epoch and batch; evaluate epoch 0 to compare like with like.

    Args:
        data: the encoded texts.
        tokenizer: names the mask token, and the ids that are never masked nor put in at random.
        masking: the rates.
        pad: fills up rows.
        budget: tokens a batch.
        seed: decides the masks, and the order where ``shuffle`` is on.
        shuffle: False keeps the order of length, for evaluation.
        where: the place a record was read from.
    """
    mask = tokenizer.special.require(masking.token)
    silent = np.array(sorted(tokenizer.silent), np.int64)
    ordinary = np.setdiff1d(np.array(sorted(tokenizer.ids), np.int64), silent)

    def assemble(rows: Ints, position: Position) -> LabelledBatch:
        generator = np.random.default_rng([seed, position.epoch, INSIDE, position.batch])
        ids, real = data.tokens.pad(rows, pad)
        chosen = (generator.random(ids.shape) < masking.rate) & real & ~np.isin(ids, silent)
        fate = generator.random(ids.shape)
        others = ordinary[generator.integers(len(ordinary), size=ids.shape)]
        seen = np.where(chosen & (fate < masking.masked), mask, ids)
        swapped = chosen & (fate >= masking.masked) & (fate < masking.masked + masking.random)
        seen = np.where(swapped, others, seen)
        return LabelledBatch(
            to_tokens(torch.from_numpy(seen), torch.from_numpy(real)),
            torch.from_numpy(ids),
            torch.from_numpy(chosen),
            rows=torch.from_numpy(data.fit.kept[rows]),
        )

    order = seed if shuffle else None
    return _bucketed(data.tokens.lengths, assemble, budget, order, where, data.fit.kept)


def _bucketed(
    lengths: Ints,
    assemble: Callable[[Ints, Position], LabelledBatch],
    budget: TokenBudget,
    seed: int | None,
    where: Where,
    kept: Ints,
) -> Bucketed[LabelledBatch]:
    return Bucketed(
        lengths=(lengths,),
        assemble=assemble,
        budget=budget,
        seed=seed,
        where=lambda row: where(int(kept[row])),
    )
