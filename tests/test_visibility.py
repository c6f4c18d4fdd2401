"""Rules, how they combine, their matrices, lowered forms and conversions to other libraries (R21, R22)."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from isoform.errors import ShapeError
from isoform.masks import from_key_padding
from isoform.tokens import Tokens
from isoform.visibility import (
    Additive,
    Allowed,
    Bidirectional,
    Causal,
    Cross,
    Documents,
    Forbidden,
    Padding,
    Places,
    Prefix,
    Visibility,
    WaitK,
    Window,
)
from tolerances import close

T = True
N = False


def grid(rule, query, key=None):
    return rule.on(query, key).grid().splitlines()


def places(rows, side="right", **more):
    tokens = Tokens.from_lists(rows, pad_id=0, side=side)
    return Places.of(dataclasses.replace(tokens, **more))


# --- single rules -----------------------------------------------------------------------------------------


def test_grids():
    assert grid(Bidirectional(), 2) == ["■ ■", "■ ■"]
    assert grid(Causal(), 3) == ["■ · ·", "■ ■ ·", "■ ■ ■"]
    assert grid(Cross(), 2, 3) == ["■ ■ ■", "■ ■ ■"]
    assert str(Causal().on(2)) == "■ ·\n■ ■"
    assert Causal().on(2).grid(marks=("1", "0")) == "1 0\n1 1"


def test_only_rules_combine_with_rules():
    with pytest.raises(TypeError, match="Causal & int"):
        _ = Causal() & 3  # pyright: ignore[reportOperatorIssue]


def test_window_counts_the_query_itself():
    assert grid(Causal() & Window(1, "past"), 3) == ["■ · ·", "· ■ ·", "· · ■"]
    assert grid(Causal() & Window(2, "past"), 4) == ["■ · · ·", "■ ■ · ·", "· ■ ■ ·", "· · ■ ■"]
    assert grid(Window(2, "both"), 4) == ["■ ■ · ·", "■ ■ ■ ·", "· ■ ■ ■", "· · ■ ■"]


def test_wait_k_reads_the_first_i_plus_k():
    """Ma et al. 2019: before writing target i (from 0), i + k source tokens have been read."""
    assert grid(WaitK(1), 3, 4) == ["■ · · ·", "■ ■ · ·", "■ ■ ■ ·"]
    assert grid(WaitK(3), 3, 4) == ["■ ■ ■ ·", "■ ■ ■ ■", "■ ■ ■ ■"]


def test_prefix_needs_its_length():
    with pytest.raises(ShapeError, match=r"prefix visibility needs Tokens\.prefix"):
        Prefix().on(4)


def test_padding_is_not_read_and_reads_nothing():
    side = places([[5, 6], [7]])
    assert Padding().on(side).matrix.tolist() == [[[T, T], [T, T]], [[T, N], [N, N]]]
    left = places([[5, 6], [7]], side="left")
    assert Padding().on(left).matrix[1].tolist() == [[N, N], [N, T]]


def test_padding_of_one_side_only():
    padded, full = places([[5, 6], [7]]), places([[1], [2]])
    assert Padding().on(full, padded).matrix.tolist() == [[[T, T]], [[T, N]]]
    assert Padding().on(padded, full).matrix.tolist() == [[[T], [T]], [[T], [N]]]
    assert Padding().on(full).matrix.tolist() == [[[T]]]


def test_documents_do_not_see_each_other():
    side = places([[5, 6, 7]], documents=torch.tensor([[0, 0, 1]]))
    assert (Causal() & Documents()).on(side).matrix[0].tolist() == [[T, N, N], [T, T, N], [N, N, T]]
    assert (Bidirectional() & Documents()).on(side).matrix[0].tolist() == [[T, T, N], [T, T, N], [N, N, T]]


def test_causal_order_is_by_absolute_place_not_by_slot():
    """R21: left padding, and queries that continue a cache (bottom-right alignment)."""
    left = places([[5, 6, 7], [8, 9]], side="left")
    assert (Causal() & Padding()).on(left).matrix[1].tolist() == [[N, N, N], [N, T, N], [N, T, T]]
    late = Places(torch.tensor([[2, 3]]))
    assert grid(Causal(), late, 4) == ["■ ■ ■ ·", "■ ■ ■ ■"]


def test_a_rule_of_ones_own():
    class Even(Visibility):
        def reads(self, query, key):
            return key.index % 2 == 0

    assert grid(Even() & Causal(), 3) == ["■ · ·", "■ · ·", "■ · ■"]
    lowered = (Even() & Bidirectional()).lower(Places.range(3), Places.range(3))
    assert lowered.mask is not None and not lowered.is_causal
    with pytest.raises(TypeError, match="must define reads"):
        Visibility().on(2)


# --- combination ------------------------------------------------------------------------------------------

RULES = [
    Bidirectional(), Cross(), Causal(), Prefix(), Padding(), Documents(), WaitK(2), Window(0, "both"),
    Window(1, "past"), Window(2, "past"), Window(3, "both"), Window(50, "past"), Window(50, "both"),
]  # fmt: skip


@st.composite
def sides(draw):
    """A query side, a key side, and whether each real query stands among the keys."""
    batch, length = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    real = [[draw(st.booleans()) for _ in range(length)] for _ in range(batch)]
    layout = draw(st.sampled_from(["right", "left", "any", "full"]))
    if layout == "full":
        real = [[True] * length for _ in range(batch)]
    elif layout != "any":
        real = [sorted(row, reverse=layout == "right") for row in real]
    documents = [sorted(draw(st.integers(0, 2)) for _ in range(length)) for _ in range(batch)]
    tokens = Tokens(
        torch.ones(batch, length, dtype=torch.long),
        torch.tensor(real),
        documents=torch.tensor(documents) if draw(st.booleans()) else None,
        prefix=torch.tensor([draw(st.integers(0, sum(row))) for row in real]),
    )
    query = Places.of(tokens)
    if draw(st.booleans()):
        return query, query
    other = draw(st.integers(1, 6))
    kept = torch.tensor(
        [sorted((draw(st.booleans()) for _ in range(other)), reverse=True) for _ in range(batch)]
    )
    key = Tokens(torch.ones(batch, other, dtype=torch.long), kept)
    return dataclasses.replace(query, documents=None), Places.of(key)


@settings(max_examples=150, deadline=None)
@given(pair=sides(), picked=st.lists(st.sampled_from(RULES), min_size=1, max_size=4))
def test_every_lowered_form_is_the_matrix(pair, picked):
    """The cheapest form a kernel takes says the same as the matrix, at every query that reads anything."""
    query, key = pair
    rule = picked[0]
    for more in picked[1:]:
        rule = rule & more
    matrix = rule.on(query, key).matrix
    together = picked[0].on(query, key)
    for more in picked[1:]:
        together = together & more.on(query, key)
    assert torch.equal(matrix.expand_as(together.matrix), together.matrix)

    lowered = rule.lower(query, key)
    batch = max(query.index.shape[0], 1 if query.real is None else query.real.shape[0], matrix.shape[0])
    shape = (batch, query.length, key.length)
    mask = lowered.written_out
    dense = torch.ones(shape, dtype=torch.bool) if mask is None else mask[:, 0].expand(shape)
    if lowered.alive is not None:
        dense = dense & lowered.alive[:, 0].expand(batch, query.length, 1)
    assert torch.equal(dense, matrix.expand(shape))
    if lowered.is_causal:  # a hint is only ever set where it is true of every real query (R22)
        real = torch.ones(shape[:2], dtype=torch.bool) if query.real is None else query.real
        triangle = torch.ones(shape[1:], dtype=torch.bool).tril()
        assert query is key
        assert torch.equal(matrix.expand(shape)[real], triangle.expand(shape)[real])


@settings(max_examples=60, deadline=None)
@given(pair=sides(), picked=st.lists(st.sampled_from(RULES), min_size=1, max_size=3))
def test_flex_form_is_the_matrix(pair, picked):
    query, key = pair
    rule = picked[0]
    for more in picked[1:]:
        rule = rule & more
    matrix = rule.on(query, key).matrix
    function = rule.mask_mod(query, key)
    index = [torch.arange(n) for n in matrix.shape]
    b, i, j = torch.meshgrid(*index, indexing="ij")
    assert torch.equal(function(b, torch.zeros_like(b), i, j).expand_as(matrix), matrix)


def test_what_needs_no_matrix_gets_none():
    """Dense masks are not built where a fused form exists."""
    rule = Causal() & Padding() & Documents()
    full, right = Places.range(4), places([[5, 6, 7], [8]])
    left = places([[5, 6, 7], [8]], side="left")
    for side in (full, right):
        lowered = rule.lower(side, side)
        assert lowered.is_causal and lowered.mask is None and not lowered.by_pair
    assert rule.lower(left, left).mask.shape == (2, 1, 3, 3)
    assert (rule & Window(4, "past")).lower(full, full).is_causal
    assert (rule & Window(2, "past")).lower(right, right).mask.shape == (1, 1, 3, 3)
    both = (Bidirectional() & Padding()).lower(right, right)
    assert both.mask.shape == (2, 1, 1, 3) and not both.by_pair
    assert Bidirectional().lower(full, full).mask is None
    assert (Cross() & Padding()).lower(full, right).mask.shape == (2, 1, 1, 3)


def test_causal_hint_is_not_given_to_other_sides():
    """Equal lengths are not equal places (R22)."""
    assert not Causal().lower(Places.range(3), Places(torch.tensor([[1, 2, 3]]))).is_causal
    later = Places(torch.tensor([[1, 2, 3]]), layout="any")
    assert not Causal().lower(later, later).is_causal


# --- truth direction --------------------------------------------------------------------------------------


def test_truth_directions_cannot_be_confused():
    allowed = Causal().on(3)
    forbidden = allowed.forbidden()
    assert isinstance(forbidden, Forbidden)
    assert torch.equal(forbidden.matrix, ~allowed.matrix)
    assert torch.equal(forbidden.allowed().matrix, allowed.matrix)
    with pytest.raises(TypeError, match=r"convert with \.allowed"):
        allowed & forbidden  # pyright: ignore
    assert torch.equal((allowed & Allowed(torch.ones(1, 3, 3, dtype=torch.bool))).matrix, allowed.matrix)
    assert not hasattr(Forbidden, "__and__")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_additive_both_ways(dtype):
    allowed = (Causal() & Window(2, "past")).on(4)
    additive = allowed.additive(dtype)
    assert isinstance(additive, Additive) and additive.matrix.dtype == dtype
    assert additive.matrix[0, 0].tolist() == [0.0, *[float("-inf")] * 3]
    assert torch.equal(additive.allowed().matrix, allowed.matrix)
    assert torch.equal(Additive(allowed.hugging_face(dtype)[:, 0]).allowed().matrix, allowed.matrix)


def test_a_mask_of_zeros_and_ones_cannot_be_added():
    with pytest.raises(ShapeError, match="Additive holds 1"):
        Additive(torch.ones(1, 2, 2))
    with pytest.raises(ShapeError, match=r"dtype torch\.int64"):
        Additive(torch.zeros(1, 2, 2, dtype=torch.long))
    with pytest.raises(ShapeError, match="expected bool"):
        Allowed(torch.ones(1, 2, 2))
    with pytest.raises(ShapeError, match=r"shape \[2, 2\]"):
        Forbidden(torch.ones(2, 2, dtype=torch.bool))


def test_is_causal_is_read_from_the_matrix():
    assert Causal().on(3).is_causal()
    assert not Causal().on(Places(torch.tensor([[1, 2]])), 3).is_causal()
    assert not (Causal() & Window(2, "past")).on(3).is_causal()
    assert not Bidirectional().on(3).is_causal()
    assert not Causal().on(places([[1, 2], [3]], side="left")).is_causal()


# --- other libraries' forms, run by those libraries -------------------------------------------------------


def ragged(rule):
    """A mask for two rows of which the second is shorter, never empty for a real query."""
    return (rule & Padding()).on(places([[1, 2, 3, 4], [5, 6, 7]]))


def reference(q, k, v, allowed):
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    weights = torch.where(allowed[:, None], scores.exp(), 0.0)
    return (weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)) @ v


@pytest.mark.parametrize("rule", [Causal(), Bidirectional(), Causal() & Window(2, "past")], ids=repr)
def test_scaled_dot_product_attention_form(rule):
    allowed = ragged(rule)
    q, k, v = torch.randn(3, 2, 3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed.sdpa())
    expected = reference(q, k, v, allowed.matrix)
    assert close(out[0], expected[0])
    assert close(out[1, :, :3], expected[1, :, :3])


@pytest.mark.parametrize("rule", [Causal(), Bidirectional(), Causal() & Window(2, "past")], ids=repr)
def test_multihead_attention_form(rule):
    """In `nn.MultiheadAttention` True is *not* allowed, and heads are folded into rows."""
    allowed = Allowed(ragged(rule).matrix[:, :3, :3]) if rule == Causal() else ragged(rule)
    t = allowed.matrix.shape[-1]
    module = nn.MultiheadAttention(6, 3, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, t, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    out, weights = module(x, x, x, attn_mask=allowed.multihead(3), average_attn_weights=False)
    real = allowed.matrix.any(-1)
    expanded = allowed.matrix[:, None].expand_as(weights)
    assert (weights[~expanded & real[:, None, :, None]] == 0).all()
    assert (weights[expanded] > 0).all()
    single = module(
        x[:1], x[:1], x[:1], attn_mask=Allowed(allowed.matrix[:1]).multihead(3), need_weights=False
    )[0]
    assert close(single[0], out[0])
    assert allowed.multihead(3).shape == (6, t, t)
    assert Allowed(allowed.matrix[:1]).multihead(3).shape == (t, t)


@pytest.mark.parametrize("rule", [Causal(), Bidirectional(), Causal() & Window(2, "past")], ids=repr)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_hugging_face_form(rule, implementation):
    """The four-dimensional additive mask, in a model of the transformers library."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=11, hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=8,
        attn_implementation=implementation, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    attention = (
        transformers.models.bert.modeling_bert.BertModel(config).double().eval().encoder.layer[0].attention
    )
    allowed = ragged(rule)
    x = torch.randn(2, 4, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    inner = attention.self
    heads = [m(x).view(2, 4, 3, 4).transpose(1, 2) for m in (inner.query, inner.key, inner.value)]
    expected = reference(*heads, allowed.matrix).transpose(1, 2).reshape(2, 4, 12)
    expected = attention.output(expected, x)
    found = attention(x, attention_mask=allowed.hugging_face(torch.float64))[0]
    assert close(found[0], expected[0])
    assert close(found[1, :3], expected[1, :3])


def test_key_padding_form():
    """A mask over keys alone is the padding rule without the query side."""
    side = places([[1, 2, 3], [4]])
    keys = from_key_padding(side.real, 2)
    assert keys.matrix.tolist() == [[[T, T, T]] * 2, [[T, N, N]] * 2]
