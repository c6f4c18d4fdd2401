"""Batches: one shift (R30), supervision that does not leak (R23), token budgets, resumable order."""

from __future__ import annotations

from contextlib import closing
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from isoform.data.batching import (
    Batch,
    BucketReport,
    LabelledBatch,
    Position,
    refuse_leaks,
    shift_right,
)
from isoform.data.batching_config import Packed, TokenBudget, Windows
from isoform.data.buckets import Bucketed, plan_batches
from isoform.data.encode import EncodedPairs, EncodedPrompts, EncodedTexts
from isoform.data.fit import Fit
from isoform.data.ragged import Ragged
from isoform.data.sequences import PackedDocuments, document_batches, pair_batches, prompt_batches
from isoform.data.windows import RandomWindows, SequentialWindows
from isoform.errors import DataError, ShapeError, SupervisionError
from isoform.tokens import Tokens
from isoform.training.state import RunState
from isoform.training.updates import Updates

PAD, BOS, EOS = 0, 1, 2


def where(row: int) -> str:
    return f"file, line {row + 1}"


def fit(count: int) -> Fit:
    return Fit(np.arange(count), 0, 0)


def rows(count: int, seed: int, longest: int = 9) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(3, 50, size=generator.integers(1, longest)).tolist() for _ in range(count)]


def test_the_one_shift() -> None:
    inputs, labels = shift_right(torch.tensor([[7, 8, EOS], [9, EOS, PAD]]), BOS)
    assert inputs.tolist() == [[BOS, 7, 8], [BOS, 9, EOS]]
    assert labels.tolist() == [[7, 8, EOS], [9, EOS, PAD]]
    inputs, _ = shift_right(torch.tensor([[7, 8], [9, 3]]), torch.tensor([5, 6]))
    assert inputs.tolist() == [[5, 7], [6, 9]]


def pairs(count: int, seed: int = 0) -> EncodedPairs:
    source, target = rows(count, seed), rows(count, seed + 1)
    return EncodedPairs(
        Ragged.from_lists([[*r, EOS] for r in source]),
        Ragged.from_lists([[*r, EOS] for r in target]),
        fit(count),
    )


def make_pairs(
    data: EncodedPairs, max_tokens: int = 60, seed: int | None = 3, pool: int = 20
) -> Bucketed[Batch]:
    budget = TokenBudget(max_tokens=max_tokens, pool=pool)
    return pair_batches(
        data, start_id=BOS, source_pad=PAD, target_pad=PAD, budget=budget, seed=seed, where=where
    )


def test_pairs_shift_once_and_supervise_every_target() -> None:
    data = pairs(50)
    seen: list[int] = []
    for batch in make_pairs(data).epoch(0):
        assert batch.source is not None
        for i, row in enumerate(batch.rows.tolist()):
            target, length = data.target.row(row), len(data.target.row(row))
            assert batch.source.rows()[i] == data.source.row(row)
            assert batch.decoder_input.rows()[i] == [BOS, *target[:-1]]
            assert batch.labels[i][:length].tolist() == target
            assert batch.supervised[i].tolist() == [t < length for t in range(batch.labels.shape[1])]
        assert batch.padded_tokens() <= 60
        assert batch.unsupervised_rows() == 0
        seen += batch.rows.tolist()
    assert sorted(seen) == list(range(50))


def test_labels_at_padding_do_not_count() -> None:
    batch = next(make_pairs(pairs(50), max_tokens=200).epoch(0))
    real = batch.decoder_input.real_or_ones()
    assert not real.all()
    assert torch.equal(batch.supervised, real)


def test_order_is_decided_by_seed_and_epoch() -> None:
    def order(seed: int | None, epoch: int) -> list[list[int]]:
        return [plan.tolist() for plan in make_pairs(pairs(50), seed=seed).plan(epoch)]

    assert order(3, 0) == order(3, 0)
    assert order(3, 0) != order(3, 1)
    assert order(3, 0) != order(4, 0)
    assert order(None, 0) == order(None, 1)
    lengths = [int(pairs(50).target.lengths[row].max()) for row in order(None, 0)]
    assert lengths == sorted(lengths)


def test_batches_come_in_no_order_of_length() -> None:
    batches = make_pairs(pairs(50), pool=50)
    lengths = [int(pairs(50).target.lengths[row].max()) for row in batches.plan(0)]
    assert len(lengths) > 10
    assert lengths != sorted(lengths)


def test_pools_limit_the_sorting() -> None:
    lengths = [np.arange(1, 101)]
    plan = plan_batches(lengths, TokenBudget(max_tokens=500, pool=25), np.random.default_rng(0))
    assert sum(map(len, plan)) == 100
    assert len(plan_batches(lengths, TokenBudget(max_tokens=500, pool=100), np.random.default_rng(0))) < len(
        plan
    )


def test_sources_stay_alike_where_target_lengths_change() -> None:
    # Two target lengths, sources 1 … 40 each: going up and down, one batch boundary pads nothing.
    source = np.tile(np.arange(1, 41), 2)
    target = np.repeat([4, 5], 40)
    plan = plan_batches([source, target], TokenBudget(max_tokens=10_000), None)
    assert source[plan[0]].tolist() == [*range(1, 41), *range(40, 0, -1)]


def test_report_is_measured() -> None:
    data = pairs(50)
    batches = make_pairs(data)
    real = padding = 0
    for batch in batches.epoch(1):
        assert batch.source is not None
        for tokens in (batch.source, batch.decoder_input):
            real += int(tokens.real_or_ones().sum())
            padding += int((~tokens.real_or_ones()).sum())
    report = batches.report(1)
    assert report == BucketReport(batches.count(1), 50, real, padding)
    assert report.share == padding / (real + padding)
    assert report.to_dict()["share"] == report.share
    assert batches.largest().padded_tokens() == max(b.padded_tokens() for b in batches.epoch(0))


def test_a_pair_that_no_batch_can_hold() -> None:
    data = pairs(10)
    worst = int((data.source.lengths + data.target.lengths).argmax())
    with pytest.raises(
        DataError, match=rf"file, line {worst + 1}: \d+ tokens, more than a whole batch of max_tokens = 5"
    ):
        make_pairs(data, max_tokens=5)


def streams() -> list[Any]:
    text = np.arange(100, 200, dtype=np.int32)
    texts = EncodedTexts(Ragged.from_lists(rows(30, 5)), fit(30))
    windows = Windows(length=8, batch_size=3)
    return [
        lambda: make_pairs(pairs(50)),
        lambda: RandomWindows(text, windows=windows, seed=1, where="text"),
        lambda: SequentialWindows(text, windows=windows, where="text"),
        lambda: PackedDocuments(
            texts, start_id=BOS, pad=PAD, packing=Packed(length=12, batch_size=2), seed=9, where=where
        ),
    ]


@pytest.mark.parametrize("make", streams())
def test_a_run_goes_on_exactly_where_it_stopped(make: Any) -> None:
    def read(position: Position, count: int) -> list[Any]:
        updates = Updates(make(), 1, torch.device("cpu"), RunState(position=position))
        with closing(iter(updates)) as found:
            return [(u.micro[0].batch.decoder_input.ids.tolist(), u.after) for u in islice(found, count)]

    first, second = make().count(0), make().count(1)
    count = first + second // 2 + 1
    whole = read(Position(), count)
    assert [ids for ids, _ in whole[:first]] == [b.decoder_input.ids.tolist() for b in make().epoch(0)]
    assert whole[first - 1][1] == Position(1, 0)
    for stop in (1, first - 1, first, count - 1):
        assert read(whole[stop - 1][1], count - stop) == whole[stop:]


def test_prompts_supervise_from_the_last_of_the_prefix() -> None:
    # Prefix 3 of 6, as in exercise 6.7: inputs 1 and 2 would see what they predict.
    data = EncodedPrompts(
        Ragged.from_lists([[BOS, 7, 8, 10, 11, 12, EOS], [BOS, 9, 13, EOS]]), np.array([3, 2]), fit(2)
    )
    batches = prompt_batches(data, pad=PAD, budget=TokenBudget(max_tokens=100), seed=None, where=where)
    batch = next(batches.epoch(0))
    assert batch.rows.tolist() == [1, 0]
    assert batch.decoder_input.rows() == [[BOS, 9, 13], [BOS, 7, 8, 10, 11, 12]]
    assert batch.labels.tolist() == [[9, 13, EOS, PAD, PAD, PAD], [7, 8, 10, 11, 12, EOS]]
    assert batch.supervised.int().tolist() == [[0, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1]]
    assert batch.decoder_input.prefix is not None
    assert batch.decoder_input.prefix.tolist() == [2, 3]
    leaking = batch.supervised.clone()
    leaking[1, :2] = True
    with pytest.raises(SupervisionError, match=r"row 1: positions \[1, 2\] lie inside the prefix of 3"):
        refuse_leaks(leaking, batch.decoder_input)
    with pytest.raises(SupervisionError, match="inside the prefix"):
        Batch(batch.decoder_input, batch.labels, leaking, rows=batch.rows)


def test_leaks_are_found_under_left_padding() -> None:
    tokens = Tokens.from_lists([[5, 6, 7, 8], [5, 6]], pad_id=0, side="left")
    tokens = Tokens(tokens.ids, tokens.real, prefix=torch.tensor([2, 2]))
    supervised = torch.tensor([[False, True, True, True], [False, False, True, True]])
    with pytest.raises(SupervisionError, match=r"row 1: positions \[1\]"):
        refuse_leaks(supervised, tokens)


def test_documents() -> None:
    texts = EncodedTexts(Ragged.from_lists([[7, 8, EOS], [9, EOS]]), fit(2))
    budget = TokenBudget(max_tokens=100)
    batch = next(
        document_batches(texts, start_id=BOS, pad=PAD, budget=budget, seed=None, where=where).epoch(0)
    )
    assert batch.source is None
    assert batch.decoder_input.rows() == [[BOS, 9], [BOS, 7, 8]]
    assert batch.labels.tolist() == [[9, EOS, PAD], [7, 8, EOS]]


def test_packed_documents_are_whole_and_told_apart() -> None:
    found = [[*row, EOS] for row in rows(40, 8, longest=7)]
    texts = EncodedTexts(Ragged.from_lists(found), fit(40))
    packed = PackedDocuments(
        texts, start_id=BOS, pad=PAD, packing=Packed(length=15, batch_size=4), seed=2, where=where
    )
    seen: list[list[int]] = []
    real = slots = 0
    for batch in packed.epoch(0):
        tokens = batch.decoder_input
        assert tokens.length == 15
        assert tokens.documents is not None
        assert torch.equal(batch.supervised, tokens.real_or_ones())
        real += int(batch.supervised.sum())
        slots += batch.supervised.numel()
        for i in range(tokens.batch):
            keep = batch.supervised[i]
            for number in tokens.documents[i][keep].unique().tolist():
                inside = keep & (tokens.documents[i] == number)
                labels, inputs = batch.labels[i][inside].tolist(), tokens.ids[i][inside].tolist()
                assert inputs == [BOS, *labels[:-1]]
                assert tokens.positions()[i][inside].tolist() == list(range(len(labels)))
                seen.append(labels)
            first = batch.labels[i][keep & (tokens.documents[i] == 0)].tolist()
            assert found[int(batch.rows[i])] == first
    assert sorted(seen) == sorted(found)
    report = packed.report(0)
    assert (report.real_tokens, report.padding_tokens) == (real, slots - real)
    assert packed.count(0) == report.batches
    assert report.sentences < 20  # 40 documents of at most 8 ids in rows of 15
    with pytest.raises(DataError, match="longer than a packed row of 3"):
        PackedDocuments(
            texts, start_id=BOS, pad=PAD, packing=Packed(length=3, batch_size=4), seed=2, where=where
        )


def test_random_windows() -> None:
    text = np.arange(100, 150, dtype=np.int32)
    windows = RandomWindows(text, windows=Windows(length=8, batch_size=40), seed=1, where="text")
    batch = next(windows.epoch(0))
    assert torch.equal(batch.labels, batch.decoder_input.ids + 1)
    assert batch.supervised.all()
    starts = batch.decoder_input.ids[:, 0]
    assert torch.equal(starts, batch.rows + 100)
    assert windows.count(0) == 1
    small = RandomWindows(text, windows=Windows(length=8, batch_size=2), seed=1, where="text")
    assert len({tuple(b.rows.tolist()) for b in small.epoch(0)}) == small.count(0) == 4
    drawn = torch.cat([next(windows.epoch(e)).labels for e in range(30)])
    assert drawn.min() == 101
    assert drawn.max() == 149  # the last id can be a label, and none lies outside
    assert not torch.equal(next(windows.epoch(1)).labels, batch.labels)
    with pytest.raises(DataError, match="text: 50 tokens; a window of 50 needs 51"):
        RandomWindows(text, windows=Windows(length=50, batch_size=1), seed=1, where="text")


@pytest.mark.parametrize("count", [33, 34, 41, 2, 8, 9])
def test_sequential_windows_score_every_id_once(count: int) -> None:
    text = np.arange(100, 100 + count, dtype=np.int32)
    windows = SequentialWindows(text, windows=Windows(length=8, batch_size=3), where="text")
    scored: list[int] = []
    padding = 0
    for batch in windows.epoch(0):
        scored += batch.labels[batch.supervised].tolist()
        assert torch.equal(batch.labels[batch.supervised], batch.decoder_input.ids[batch.supervised] + 1)
        padding += int((~batch.supervised).sum())
    assert scored == text[1:].tolist()
    assert windows.report(0).padding_tokens == padding
    assert windows.report(0).real_tokens == count - 1


def test_rows_of_padding_only_are_named() -> None:
    real = torch.tensor([[True, True], [False, False]])
    ids = torch.ones(2, 2, dtype=torch.long)
    record = torch.tensor([4, 17])
    good = Tokens(ids)
    with pytest.raises(
        SupervisionError, match=r"batch row 1 \(record 17\): the decoder input is padding only"
    ):
        Batch(Tokens(ids, real), ids, torch.zeros_like(real), rows=record)
    with pytest.raises(SupervisionError, match=r"record 17\): the source is padding only"):
        Batch(good, ids, torch.zeros_like(real), rows=record, source=Tokens(ids, real))
    with pytest.raises(SupervisionError, match="the row is padding only"):
        LabelledBatch(Tokens(ids, real), ids, torch.zeros_like(real), rows=record)


def test_rows_without_supervision_are_counted() -> None:
    ids = torch.ones(2, 2, dtype=torch.long)
    supervised = torch.tensor([[False, False], [False, True]])
    assert Batch(Tokens(ids), ids, supervised, rows=torch.arange(2)).unsupervised_rows() == 1
    assert LabelledBatch(Tokens(ids), ids, supervised, rows=torch.arange(2)).unsupervised_rows() == 1


def test_labels_on_padding_and_wrong_shapes_are_refused() -> None:
    ids = torch.ones(2, 2, dtype=torch.long)
    real = torch.tensor([[True, True], [True, False]])
    every = torch.ones_like(real)
    with pytest.raises(SupervisionError, match=r"row 1 .*a label stands on padding"):
        Batch(Tokens(ids, real), ids, every, rows=torch.arange(2))
    with pytest.raises(SupervisionError, match=r"row 1 .*a label stands on padding"):
        LabelledBatch(Tokens(ids, real), ids, every, rows=torch.arange(2))
    with pytest.raises(ShapeError, match=r"labels has shape \[2, 1\], expected \[2, 2\]"):
        Batch(Tokens(ids), ids[:, :1], every, rows=torch.arange(2))
    with pytest.raises(ShapeError, match="supervised"):
        LabelledBatch(Tokens(ids), ids[:, 0], every, rows=torch.arange(2))


def test_batches_move() -> None:
    batch = next(make_pairs(pairs(9)).epoch(0))
    moved = batch.to("meta")
    assert moved.labels.device.type == moved.decoder_input.ids.device.type == "meta"
    assert moved.source is not None
    assert moved.source.ids.device.type == "meta"
