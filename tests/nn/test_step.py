"""The flat step is the function of the modules, to 1e-9 in float64, for any network it takes."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from isoform.generation import Cached, Uncached
from isoform.generation import forward as forward_module
from isoform.nn.lanes import _repeats
from isoform.tokens import Tokens
from networks import network, preset
from strategies import model_configs

NEW = 6
PROMPTS, SOURCES = [[3, 1, 4, 2], [5], [2, 6, 1]], [[1, 2], [3, 4, 5, 6], [2]]


def fits(cfg) -> bool:
    table = cfg.embedding.positions
    """A source under prefix visibility would need a prefix of its own."""
    if cfg.source is not None and cfg.encoder.visibility == "prefix":
        return False
    return cfg.stack.visibility != "bidirectional" and (
        table.kind != "learned" or table.max_positions >= max(map(len, PROMPTS)) + NEW
    )


MOVES = [
    [([2, 0], False)],
    [([1, 1, 0, 2, 2], False)],  # as drafts of which some ended at once
    [([0, 0, 1, 1, 2, 2], False), ([1, 0, 2, 2, 4, 5], True), ([2, 3, 0, 1], False), ([1, 1, 3, 2], True)],
    [([0, 0, 1, 1, 2, 2], False), ([4, 0, 1, 3], False)],  # beside beams: rows that no sample shares
]
any_network = given(
    model_configs(structures=("decoder", "encoder-decoder"), token_head=True).filter(fits),
    st.sampled_from(["left", "right"]),
    st.sampled_from([PROMPTS, [p[:1] for p in PROMPTS]]),
    st.sampled_from(MOVES),
    st.sampled_from([1, 64]),
)


@any_network
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_network(cfg, side, prompts, moves, shared_from):
    check(cfg, side, prompts, moves, shared_from)


@pytest.mark.soak
@any_network
@settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck))
def test_very_many_networks(cfg, side, prompts, moves, shared_from):
    check(cfg, side, prompts, moves, shared_from)


@torch.inference_mode()
def check(cfg, side, prompts, moves, shared_from):
    """Prompts, then in turns a step and rows that move."""
    model = network(cfg)
    assume(forward_module.prepare(model) is not None)
    prefix = torch.tensor([1, 1, 1]) if cfg.stack.visibility == "prefix" else None
    padded = Tokens.from_lists(prompts, pad_id=0, side=side)
    tokens = Tokens(padded.ids, padded.real, prefix=prefix, layout=padded.layout)
    source = None if cfg.source is None else Tokens.from_lists(SOURCES, pad_id=0, side=side)
    with mock.patch("isoform.nn.lanes.SHARED_FROM", shared_from):
        both = Cached(model), Uncached(model)
        found = [forward.begin(tokens, source, NEW + 1) for forward in both]
        count = len(prompts)
        for number, (rows, same) in enumerate([*moves, ([], False)]):
            torch.testing.assert_close(*found, rtol=0, atol=1e-9)
            ids = torch.tensor([(i + 3 * number) % 7 for i in range(count)])
            found = [forward.step(ids) for forward in both]
            for forward in both if rows else ():
                forward.select(torch.tensor(rows), same_sample=same)
            count = len(rows) or count
        torch.testing.assert_close(*found, rtol=0, atol=1e-9)


def test_tables_grow_with_the_rows():
    """Beyond the first 64 positions, and in room that is made as it is needed."""
    with torch.inference_mode():
        for name in ("llama", "original", "gpt2", "t5"):
            model = network(preset(name, **({"max_positions": 200} if name == "gpt2" else {})))
            tokens = Tokens(torch.tensor([[1, 2, 3]]))
            source = None if model.config.source is None else tokens
            flat, whole = Cached(model), Uncached(model)
            for f in (flat, whole):
                f.begin(tokens, source, 140)
            for i in range(136):
                ids = torch.tensor([i % 19])
                found = flat.step(ids)
                whole._rows.append(ids)
            torch.testing.assert_close(found, whole._logits(), rtol=0, atol=1e-9)


def test_groups_of_equal_rows():
    assert _repeats([0, 0, 1, 1]) == 2
    assert _repeats([3, 3, 3]) == 3
    assert _repeats([0, 1, 2]) == _repeats([]) == 1
    assert _repeats([0, 0, 1]) == _repeats([0, 1, 1]) == 1
