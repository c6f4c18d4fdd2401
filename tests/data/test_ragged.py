from __future__ import annotations

import numpy as np

from isoform.data.ragged import Ragged

ROWS = [[5, 6, 7], [], [8], [9, 10]]


def test_rows_come_back() -> None:
    ragged = Ragged.from_lists(ROWS)
    assert [ragged.row(i) for i in range(len(ragged))] == ROWS
    assert ragged.flat.dtype == np.int32
    picked = ragged.select(np.array([3, 0]))
    assert [picked.row(i) for i in range(2)] == [[9, 10], [5, 6, 7]]
    assert picked.compact().tolist() == [9, 10, 5, 6, 7]
    assert [ragged.cut(1).row(i) for i in range(4)] == [[5], [], [8], [9]]


def test_around_and_join() -> None:
    ragged = Ragged.from_lists(ROWS).select(np.array([2, 1, 0]))
    around = ragged.around((1, 2), (3,))
    assert [around.row(i) for i in range(3)] == [[1, 2, 8, 3], [1, 2, 3], [1, 2, 5, 6, 7, 3]]
    joined = ragged.join(Ragged.from_lists([[1], [2, 3], []]))
    assert [joined.row(i) for i in range(3)] == [[8, 1], [2, 3], [5, 6, 7]]
    both = Ragged.concatenate([ragged, joined])
    assert [both.row(i) for i in range(6)] == [[8], [], [5, 6, 7], [8, 1], [2, 3], [5, 6, 7]]


def test_padding() -> None:
    ragged = Ragged.from_lists(ROWS)
    ids, real = ragged.pad(np.array([3, 0]), 99)
    assert ids.tolist() == [[9, 10, 99], [5, 6, 7]]
    assert real.tolist() == [[True, True, False], [True, True, True]]
    assert ragged.tokens(np.array([3, 0]), 99).layout == "right"
    full = ragged.tokens(np.array([0, 0]), 99)
    assert full.layout == "full"
    assert full.real is None
