"""Tokens: both padding sides, derived places and positions, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isoform.errors import ShapeError
from isoform.tokens import Tokens

ROWS = [[5, 6, 7], [8], [9, 1, 2, 3]]
realness = st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4).map(torch.tensor)


def test_rows_are_padded_on_the_side_asked_for():
    right, left = (Tokens.from_lists(ROWS, pad_id=17, side=side) for side in ("right", "left"))
    assert right.ids.tolist() == [[5, 6, 7, 17], [8, 17, 17, 17], [9, 1, 2, 3]]
    assert left.ids.tolist() == [[17, 5, 6, 7], [17, 17, 17, 8], [9, 1, 2, 3]]
    assert (right.layout, left.layout) == ("right", "left")
    assert right.real is not None
    assert right.real.tolist() == [[True] * 3 + [False], [True] + [False] * 3, [True] * 4]
    assert right.rows() == left.rows() == ROWS
    assert right.lengths().tolist() == left.lengths().tolist() == [3, 1, 4]
    assert (right.batch, right.length) == (3, 4)


def test_rows_of_one_length_need_no_padding():
    full = Tokens.from_lists([[1, 2], [3, 4]], pad_id=0)
    assert full.real is None
    assert full.layout == "full"
    assert full.real_or_ones().all()
    assert full.positions().tolist() == [[0, 1], [0, 1]]


def test_positions_count_real_tokens_on_either_side():
    right, left = (Tokens.from_lists(ROWS, pad_id=0, side=side) for side in ("right", "left"))
    assert right.positions().tolist() == [[0, 1, 2, 2], [0, 0, 0, 0], [0, 1, 2, 3]]
    assert left.positions().tolist() == [[0, 0, 1, 2], [0, 0, 0, 0], [0, 1, 2, 3]]


def test_given_positions_win():
    tokens = Tokens(torch.ones(1, 3, dtype=torch.long), position_ids=torch.tensor([[4, 0, 9]]))
    assert tokens.positions().tolist() == [[4, 0, 9]]
    assert tokens.places().tolist() == [[0, 1, 2]]


def test_positions_start_anew_at_each_document_and_places_do_not():
    ids = torch.arange(8)[None]
    documents = torch.tensor([[3, 3, 3, 4, 4, 4, 4, 3]])
    assert Tokens(ids, documents=documents).positions().tolist() == [[0, 1, 2, 0, 1, 2, 3, 0]]
    assert Tokens(ids, documents=documents).places().tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    real = torch.tensor([[False, True, True, True, False, True, True, False]])
    # The hole inside document 4, whatever number stands there, is no start: its tokens count 0, 1, 2.
    holed = torch.tensor([[0, 3, 3, 4, 9, 4, 4, 0]])
    assert Tokens(ids, real, documents=holed).positions()[real].tolist() == [0, 1, 0, 1, 2]


@given(realness)
def test_layout_is_what_the_padding_is(real):
    layout = Tokens(torch.ones(real.shape, dtype=torch.long), real).layout
    on_the_right = all(row == sorted(row, reverse=True) for row in real.int().tolist())
    on_the_left = all(row == sorted(row) for row in real.int().tolist())
    if real.all():
        assert layout == "full"
    elif on_the_right:  # rows of padding alone are on both sides
        assert layout == "right"
    else:
        assert layout == ("left" if on_the_left else "any")


@given(realness, st.sampled_from(["right", "left"]))
def test_padding_moves_and_everything_goes_with_its_token(real, side):
    n = real.numel()
    numbered = torch.arange(n).view(real.shape)
    tokens = Tokens(numbered, real, numbered + n, None, numbered + 2 * n, numbered + 3 * n)
    moved = tokens.padded(side)
    assert moved.rows() == tokens.rows()
    assert moved.layout in ("full", side)
    kept = moved.real_or_ones()
    for name, step in (("documents", 1), ("token_types", 2), ("position_ids", 3)):
        assert torch.equal(getattr(moved, name)[kept], moved.ids[kept] + step * n)
    flags = kept.int().tolist()
    assert all(row == sorted(row, reverse=side == "right") for row in flags)


def test_padding_that_is_there_is_left_alone():
    tokens = Tokens.from_lists(ROWS, pad_id=0, side="left")
    assert tokens.padded("left") is tokens


def test_selected_rows_keep_all_that_is_theirs():
    tokens = dataclasses.replace(
        Tokens.from_lists(ROWS, pad_id=0, side="left"),
        prefix=torch.tensor([1, 0, 2]),
        documents=torch.arange(12).view(3, 4),
    )
    chosen = tokens.select(torch.tensor([2, 0, 2]))
    assert chosen.rows() == [ROWS[2], ROWS[0], ROWS[2]]
    assert chosen.prefix is not None
    assert chosen.prefix.tolist() == [2, 1, 2]
    assert chosen.documents is not None
    assert chosen.documents[:, 0].tolist() == [8, 0, 8]
    assert tokens.to("cpu").rows() == ROWS


IDS = torch.zeros(2, 3, dtype=torch.long)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ids": torch.zeros(3, dtype=torch.long)}, r"Tokens\.ids has shape \[3\], expected"),
        ({"ids": torch.zeros(2, 3)}, r"Tokens\.ids has dtype torch\.float32, expected integers"),
        ({"real": torch.ones(2, 4, dtype=torch.bool)}, r"Tokens\.real has shape \[2, 4\], Tokens\.ids"),
        ({"real": torch.ones(2, 3)}, r"Tokens\.real has dtype torch\.float32, expected bool with True"),
        ({"real": torch.ones(2, 3, dtype=torch.long)}, r"Tokens\.real has dtype torch\.int64, expected bool"),
        ({"documents": IDS[:1]}, r"Tokens\.documents has shape \[1, 3\], Tokens\.ids \[2, 3\]"),
        ({"token_types": IDS[:, :2]}, r"Tokens\.token_types has shape \[2, 2\]"),
        ({"position_ids": IDS[0]}, r"Tokens\.position_ids has shape \[3\]"),
        ({"prefix": torch.tensor([1])}, r"Tokens\.prefix has shape \[1\], expected \[2\]"),
        (
            {"real": torch.tensor([[False, True, True]] * 2), "layout": "right"},
            r"Tokens\.layout is 'right', but the padding of Tokens\.real is 'left'",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(fields, message):
    with pytest.raises(ShapeError, match=message):
        Tokens(**{"ids": IDS, **fields})
