from __future__ import annotations

import numpy as np
import pytest
import torch

from isoform.data import Characters, Masking, SpecialIds, Specials, TokenBudget, Tokenizer
from isoform.data.encode import EncodedLabels, EncodedTags, EncodedTexts
from isoform.data.fit import Fit
from isoform.data.labelling import class_batches, masked_batches, tag_batches
from isoform.data.ragged import Ragged
from isoform.errors import TokenizerError

BUDGET = TokenBudget(max_tokens=4_000)


def where(row: int) -> str:
    return f"line {row + 1}"


def test_classes() -> None:
    data = EncodedLabels(Ragged.from_lists([[5, 6, 7], [8]]), np.array([1, 0]), Fit(np.array([0, 4]), 0, 0))
    batch = next(class_batches(data, pad=0, budget=BUDGET, seed=None, where=where).epoch(0))
    assert batch.rows.tolist() == [4, 0]
    assert batch.tokens.rows() == [[8], [5, 6, 7]]
    assert batch.labels.tolist() == [0, 1]
    assert batch.supervised.tolist() == [True, True]


def test_tags() -> None:
    data = EncodedTags(
        Ragged.from_lists([[1, 5, 6, 2], [1, 7, 2]]),
        Ragged.from_lists([[-1, 3, -1, -1], [-1, 0, -1]]),
        Fit(np.arange(2), 0, 0),
    )
    batch = next(tag_batches(data, pad=0, budget=BUDGET, seed=None, where=where).epoch(0))
    assert batch.supervised.int().tolist() == [[0, 1, 0, 0], [0, 1, 0, 0]]
    assert batch.labels[batch.supervised].tolist() == [0, 3]
    assert batch.labels.min() >= 0


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    config = Characters(specials=Specials(extra=("<mask>",)))
    return Tokenizer.train(config, ["abcdefghijklmnopqrstuvwxyz"], where="")


def texts(tokenizer: Tokenizer) -> EncodedTexts:
    generator = np.random.default_rng(1)
    letters = [tokenizer.id(c) for c in "abcdefghijkl"]
    rows = [
        [tokenizer.special.require("bos"), *generator.choice(letters, generator.integers(40, 60)).tolist()]
        for _ in range(400)
    ]
    return EncodedTexts(Ragged.from_lists(rows), Fit(np.arange(len(rows)), 0, 0))


def test_masking_follows_the_rates(tokenizer: Tokenizer) -> None:
    data = texts(tokenizer)
    mask, bos = tokenizer.special.require("<mask>"), tokenizer.special.require("bos")
    batches = masked_batches(
        data,
        tokenizer,
        masking=Masking(),
        pad=tokenizer.special.require("pad"),
        budget=BUDGET,
        seed=7,
        shuffle=True,
        where=where,
    )
    chosen = masked = same = ordinary = 0
    others: set[int] = set()
    for batch in batches.epoch(0):
        for i, row in enumerate(batch.rows.tolist()):
            length = int(data.tokens.lengths[row])
            assert batch.labels[i][:length].tolist() == data.tokens.row(row)
        real = batch.tokens.real_or_ones()
        assert not (batch.supervised & (batch.labels == bos)).any()
        untouched = real & ~batch.supervised
        assert torch.equal(batch.tokens.ids[untouched], batch.labels[untouched])
        seen, labels = batch.tokens.ids[batch.supervised], batch.labels[batch.supervised]
        ordinary += int((real & (batch.labels != bos)).sum())
        chosen += len(seen)
        masked += int((seen == mask).sum())
        same += int((seen == labels).sum())
        others |= set(seen[(seen != mask) & (seen != labels)].tolist())
    assert chosen / ordinary == pytest.approx(0.15, abs=0.01)
    assert masked / chosen == pytest.approx(0.8, abs=0.03)
    assert same / chosen == pytest.approx(0.1 + 0.1 / 27, abs=0.03)
    assert not others & tokenizer.silent
    assert len(others) > 20


def test_special_ids_are_never_put_in(tokenizer: Tokenizer) -> None:
    # Special ids in the midst of the others, as in vocabularies brought along.
    special = SpecialIds(pad=3, bos=5, eos=9, extra={"<mask>": 20})
    odd = Tokenizer(tokenizer.backend, special)
    batches = masked_batches(
        texts(tokenizer),
        odd,
        masking=Masking(rate=1, masked=0, random=1),
        pad=3,
        budget=BUDGET,
        seed=7,
        shuffle=True,
        where=where,
    )
    put_in = {int(i) for batch in batches.epoch(0) for i in batch.tokens.ids[batch.supervised]}
    assert len(put_in) > 15
    assert not put_in & {3, 5, 9, 20}


def test_masks_are_decided_by_seed_epoch_and_batch(tokenizer: Tokenizer) -> None:
    def ids(seed: int, epoch: int, start: int = 0) -> list[list[list[int]]]:
        batches = masked_batches(
            texts(tokenizer),
            tokenizer,
            masking=Masking(),
            pad=0,
            budget=BUDGET,
            seed=seed,
            shuffle=False,
            where=where,
        )
        return [batch.tokens.ids.tolist() for batch in batches.epoch(epoch, start)]

    assert ids(1, 0) == ids(1, 0)
    assert ids(1, 0)[2:] == ids(1, 0, 2)
    assert ids(1, 0) != ids(1, 1)
    assert ids(1, 0) != ids(2, 0)


def test_masking_needs_its_token(tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match=r"no \[MASK\] token"):
        masked_batches(
            texts(tokenizer),
            tokenizer,
            masking=Masking(token="[MASK]"),
            pad=0,
            budget=BUDGET,
            seed=1,
            shuffle=False,
            where=where,
        )
