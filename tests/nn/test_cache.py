"""R32: hidden states from a cache are those of one full pass, to 1e-9 in float64.

`tests/generation/test_cached.py` holds whole generation (searches, stopping) to the same; here is the network
alone: prompts in pieces of any length, rows that move, leave and repeat as beams do, room that grows.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isoform import config
from isoform.config.positions import BY_LENGTH
from isoform.errors import ShapeError
from isoform.nn import Cache
from isoform.tokens import Tokens
from networks import network, preset, rows
from strategies import LONGEST, model_configs
from tolerances import close

BOUND = 1e-9
LENGTHS, SOURCES = (7, 2, 5), (4, 6, 1)
NEW = 6
WIDE = torch.float64

ROTARY = {"theta": 50.0, "precision": "float64"}
SCALINGS = {
    "linear": config.LinearScaling(factor=2.5),
    "llama3": config.Llama3Scaling(
        factor=4.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=32
    ),
    "yarn": config.YarnScaling(
        factor=4.0, original_length=16, beta_fast=32.0, beta_slow=1.0, attention_factor=1.14, truncate=True
    ),
}
INSIDE = {
    "none": config.NoPositions(),
    "rotary half": config.Rotary(layout="half", width=4, **ROTARY),
    "rotary interleaved": config.Rotary(layout="interleaved", width=4, **ROTARY),
    "rotary partial": config.Rotary(layout="half", width=2, **ROTARY),
    **{
        f"rotary {name}": config.Rotary(layout="half", width=4, scaling=s, **ROTARY)
        for name, s in SCALINGS.items()
    },
    "alibi": config.Alibi(),
    "alibi rounded": config.Alibi(rounding="bfloat16"),
    "buckets": config.RelativeBuckets(n_buckets=6, max_distance=9, bidirectional=False),
}
ADDED = {
    "sinusoidal interleaved": config.Sinusoidal(
        layout="interleaved", spacing="half_width", offset=3, base=100.0, precision="float64"
    ),
    "sinusoidal concatenated": config.Sinusoidal(
        layout="concatenated", spacing="half_width_minus_one", offset=1, base=100.0, precision="float64"
    ),
    "learned": config.Learned(max_positions=20, offset=2),
}
KINDS = [*INSIDE, *ADDED]
STRUCTURES = ["causal", "prefix", "encoder-decoder"]


def configuration(kind, kv, window, structure):
    """`preset` of that structure with these positions in place of its own."""
    cfg = preset("original") if structure == "encoder-decoder" else preset("gpt2", visibility=structure)
    changes = {
        "decoder.layer.attention.n_kv_heads": kv,
        "decoder.layer.attention.window": window,
        "decoder.layer.attention.positions": INSIDE.get(kind, config.NoPositions()),
        "embedding.positions": ADDED.get(kind, config.NoPositions()),
    }
    if structure == "encoder-decoder":
        changes["source.positions"] = ADDED.get(kind, config.NoPositions())
        changes["decoder.layer.cross_attention.n_kv_heads"] = kv
    return cfg.replace(**changes)


def padded(lists, side, prefix=None):
    tokens = Tokens.from_lists(lists, pad_id=0, side=side)
    return tokens if prefix is None else dataclasses.replace(tokens, prefix=prefix)


def full(model, lists, sources, prefix):
    """Each row alone, in one pass: no padding, no cache, no batch."""
    found = []
    for i, row in enumerate(lists):
        source = None if sources is None else Tokens(torch.tensor([sources[i]]))
        own = None if prefix is None else prefix[i : i + 1]
        found.append(model(Tokens(torch.tensor([row]), prefix=own), source=source).hidden[0])
    return found


def started(model, prompts, sources, prefix, side, capacity=20):
    """A cache that holds the prompts, and the states of their tokens."""
    cache = Cache.allocate(model.config, len(prompts), capacity, dtype=WIDE)
    if sources is not None:
        model.remember(cache, model.encode(padded(sources, side)))
    tokens = padded(prompts, side, prefix).padded("right")
    return cache, model.hidden(tokens, cache=cache)


def compare(found, expected, first=0):
    """States of new tokens, [row][step], with those of the full pass from place `first[row]` on."""
    for row, (mine, whole) in enumerate(zip(found, expected, strict=True)):
        begin = first if isinstance(first, int) else first[row]
        part = whole[begin : begin + len(mine)]
        assert (mine - part).abs().max() <= BOUND * max(1.0, float(part.abs().max()))


def check(kind, kv, window, side, structure):
    for lengths in (LENGTHS, (4, 4, 4)):
        continued(kind, kv, window, side, structure, lengths)


def continued(kind, kv, window, side, structure, lengths):
    model = network(configuration(kind, kv, window, structure))
    prompts, more = rows(1, lengths), rows(2, (NEW,) * 3)
    sources = rows(3, SOURCES) if structure == "encoder-decoder" else None
    prefix = torch.tensor([3, 2, 1]) if structure == "prefix" else None
    with torch.no_grad():
        expected = full(model, [a + b for a, b in zip(prompts, more, strict=True)], sources, prefix)
        cache, states = started(model, prompts, sources, prefix, side)
        compare([states[i, :n] for i, n in enumerate(lengths)], expected)
        # One token, then two at once, then three.
        new = torch.tensor(more)
        pieces = [model.hidden(Tokens(part), cache=cache) for part in new.split([1, 2, 3], 1)]
        compare(list(torch.cat(pieces, 1)), expected, lengths)
        # Beams: rows change places and repeat; each goes on with a token of its own.
        order = torch.tensor([2, 0, 2, 1])
        moved = cache.select(order)
        ids = torch.tensor([[1], [2], [3], [4]])
        out = model.hidden(Tokens(ids), cache=moved)
        lists = [prompts[i] + more[i] + [int(t)] for i, t in zip(order.tolist(), ids[:, 0], strict=True)]
        picked = None if sources is None else [sources[i] for i in order.tolist()]
        own = None if prefix is None else prefix[order]
        last = [len(row) - 1 for row in lists]
        compare(list(out), full(model, lists, picked, own), last)


HEADS, WINDOWS, SIDES = (6, 2, 1), (None, 3), ("right", "left")
GRID = list(itertools.product(KINDS, HEADS, WINDOWS, SIDES, STRUCTURES))
# Every kind twice; the other axes go round, each at its own pace.
SLICE = [
    (
        kind,
        HEADS[(i + j) % 3],
        WINDOWS[(i // 2 + j) % 2],
        SIDES[(i + j) % 2],
        STRUCTURES[(i + 2 * j) % 3],
    )
    for i, kind in enumerate(KINDS)
    for j in range(2)
]


def sensible(kind, structure):
    return not (kind == "alibi rounded" and structure == "prefix")  # refused: it counts from the row's start


@pytest.mark.parametrize(
    ("kind", "kv", "window", "side", "structure"), [g for g in SLICE if sensible(g[0], g[4])]
)
def test_slice(kind, kv, window, side, structure):
    check(kind, kv, window, side, structure)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "kv"), list(itertools.product(KINDS, HEADS)))
def test_grid(kind, kv):
    for point in GRID:
        if point[:2] == (kind, kv) and sensible(kind, point[4]):
            check(*point)


def continues(cfg):
    """Dynamic NTK and LongRoPE have no cache beyond their length: earlier states were computed with other
    frequencies. A source under prefix visibility would need a prefix of its own."""
    dynamic = any(isinstance(r.scaling, BY_LENGTH) for r in cfg.rotaries())
    return not dynamic and (cfg.source is None or cfg.encoder.visibility != "prefix")


networks_with_pieces = given(
    model_configs(structures=("decoder", "encoder-decoder"), token_head=True).filter(continues),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.sampled_from(SIDES),
    st.sampled_from([(4, 1, 3), (3, 3, 3)]),
)


@networks_with_pieces
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_network_in_any_pieces(cfg, pieces, side, lengths):
    any_network(cfg, pieces, side, lengths)


@pytest.mark.long
@networks_with_pieces
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
def test_very_many_networks_in_any_pieces(cfg, pieces, side, lengths):
    any_network(cfg, pieces, side, lengths)


def any_network(cfg, pieces, side, lengths):
    """Rows of one length go on without masks and index tensors, rows of several with them."""
    model = network(cfg)
    size = cfg.embedding.vocab_size
    prompts = [
        [1 + (i * 7 + j * 3) % (size - 1) if size > 1 else 0 for j in range(n)] for i, n in enumerate(lengths)
    ]
    more = [[(i * 5 + j * 11) % size for j in range(sum(pieces))] for i in range(3)]
    sources = None
    if cfg.source is not None:
        sources = [[(i + j) % cfg.source.vocab_size for j in range(n)] for i, n in enumerate((2, 5, 1))]
    prefix = torch.tensor([2, 1, 3]) if cfg.stack.visibility == "prefix" else None
    with torch.no_grad():
        expected = full(model, [a + b for a, b in zip(prompts, more, strict=True)], sources, prefix)
        cache, states = started(model, prompts, sources, prefix, side, capacity=LONGEST)
        compare([states[i, :n] for i, n in enumerate(lengths)], expected)
        steps = [model.hidden(Tokens(part), cache=cache) for part in torch.tensor(more).split(pieces, 1)]
        compare(list(torch.cat(steps, 1)), expected, lengths)


# --- the cache itself -------------------------------------------------------------------------------------


def test_pieces_may_be_padded_on_the_right():
    """Rows go on at their own pace: a row that is given nothing stays where it is."""
    model = network(preset("llama", window=None))
    prompts = rows(1, LENGTHS)
    more = [[5, 6, 7], [], [8]]
    with torch.no_grad():
        cache, _ = started(model, prompts, None, None, "left")
        found = model.hidden(padded(more, "right"), cache=cache)
        assert cache.lengths.tolist() == [10, 2, 6]
        then = model.hidden(Tokens(torch.tensor([[1], [2], [3]])), cache=cache)
        lists = [a + b + [n] for a, b, n in zip(prompts, more, (1, 2, 3), strict=True)]
        expected = full(model, lists, None, None)
    compare([found[0], found[2, :1]], [expected[0], expected[2]], (7, 5))
    compare(list(then), expected, (10, 2, 6))


def test_every_token_lies_in_the_slot_of_its_place():
    """Whatever side the prompt was padded on (R31)."""
    model = network(preset("gpt2"))
    with torch.no_grad():
        right, _ = started(model, rows(1, LENGTHS), None, None, "right")
        left, _ = started(model, rows(1, LENGTHS), None, None, "left")
    assert right.lengths.tolist() == left.lengths.tolist() == list(LENGTHS)
    for a, b in zip(right.layers, left.layers, strict=True):
        for row, n in enumerate(LENGTHS):
            assert torch.equal(a.keys[row, :, :n], b.keys[row, :, :n])
            assert torch.equal(a.values[row, :, :n], b.values[row, :, :n])


def test_reading_fewer_slots_changes_nothing():
    model = network(preset("bloom"))
    token = Tokens(torch.tensor([[1], [2], [3]]))
    with torch.no_grad():
        results = []
        for visible in (None, 8):
            cache, _ = started(model, rows(1, LENGTHS), None, None, "right")
            cache.visible = visible
            results.append(model.hidden(token, cache=cache))
    assert close(results[0], results[1])


def test_growing_keeps_all_there_is():
    model = network(preset("gpt2"))
    with torch.no_grad():
        small, _ = started(model, rows(1, LENGTHS), None, None, "right", capacity=7)
        large = small.grow(20)
        assert (large.capacity, large.batch) == (20, 3)
        assert torch.equal(large.layers[1].keys[:, :, :7], small.layers[1].keys)
        found = model.hidden(Tokens(torch.tensor([[1], [2], [3]])), cache=large)
        lists = [[*row, n] for row, n in zip(rows(1, LENGTHS), (1, 2, 3), strict=True)]
        compare(list(found), full(model, lists, None, None), LENGTHS)


def test_reorder_is_select_among_rows_of_one_source():
    model = network(preset("original"))
    prompts, sources = rows(1, (4, 4, 4)), rows(3, (5, 5, 5))[:1] * 3
    order = torch.tensor([1, 1, 0])
    with torch.no_grad():
        cache, _ = started(model, prompts, sources, None, "right")
        a, b = cache.select(order), cache.reorder(order)
        step = Tokens(torch.tensor([[1], [2], [3]]))
        assert close(model.hidden(step, cache=a), model.hidden(step, cache=b))
    assert b.memory is cache.memory
    assert cache.lengths.tolist() == [4, 4, 4]  # what is done to the copy is not done to it


def test_selecting_copies():
    """A row that two beams share is written by each in its own copy."""
    model = network(preset("gpt2"))
    with torch.no_grad():
        cache, _ = started(model, rows(1, LENGTHS), None, None, "right")
        kept = cache.layers[0].keys.clone()
        twice = cache.select(torch.tensor([0, 0]))
        model.hidden(Tokens(torch.tensor([[1], [2]])), cache=twice)
    assert torch.equal(cache.layers[0].keys, kept)
    assert not torch.equal(twice.layers[0].keys[0, :, 7], twice.layers[0].keys[1, :, 7])
    assert cache.lengths.tolist() == list(LENGTHS)


def test_grouped_heads_store_only_theirs():
    cache = Cache.allocate(preset("llama", n_kv_heads=2), 3, 8, dtype=torch.float32)
    assert cache.layers[0].keys.shape == (3, 2, 8, 4)


def test_what_cannot_continue_is_refused():
    model = network(preset("gpt2"))
    with torch.no_grad():
        cache, _ = started(model, rows(1, LENGTHS), None, None, "right")
        with pytest.raises(ShapeError, match=r"must be padded on the right: use tokens\.padded\('right'\)"):
            model.hidden(padded(rows(2, (2, 1, 2)), "left"), cache=cache)
        ids = torch.ones(3, 1, dtype=torch.long)
        for given_ in ({"documents": ids}, {"position_ids": ids}):
            with pytest.raises(ShapeError, match="documents and position_ids cannot be given"):
                model.hidden(Tokens(ids, **given_), cache=cache)
    with pytest.raises(ShapeError, match="41 positions asked for, the model's learned table has 40"):
        Cache.allocate(model.config, 1, 41, dtype=WIDE)


def test_the_memory_is_projected_once():
    model = network(preset("original"))
    projected = []
    for block in model.decoder.blocks():
        whole = block.cross_attention.body.key_value
        whole.register_forward_hook(lambda *_: projected.append(1))
    with torch.no_grad():
        cache, _ = started(model, rows(1, LENGTHS), rows(3, SOURCES), None, "right")
        for token in range(1, 5):
            model.hidden(Tokens(torch.full((3, 1), token)), cache=cache)
    assert len(projected) == len(model.decoder.layers)


@torch.inference_mode()
def test_a_condition_is_read_at_once():
    """Its first tokens read its last: in pieces they would read what is not there yet, and say nothing."""
    model = network(preset("gpt2", visibility="prefix"))
    ids = torch.tensor([[3, 1, 4, 2, 5], [5, 2, 6, 1, 3]])
    prefix = torch.tensor([2, 4])
    whole = model.hidden(Tokens(ids, prefix=prefix))
    with pytest.raises(ShapeError, match="row 1: 3 tokens are read into an empty cache, its condition has 4"):
        model.hidden(Tokens(ids[:, :3], prefix=prefix), cache=Cache.allocate(model.config, 2, 5, dtype=WIDE))
    cache = Cache.allocate(model.config, 2, 5, dtype=WIDE)
    parts = [model.hidden(Tokens(ids[:, :4], prefix=prefix), cache=cache)]
    parts.append(model.hidden(Tokens(ids[:, 4:]), cache=cache))
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=BOUND)
