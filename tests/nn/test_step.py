"""The flat step, and the one in machine code, are the function of the modules, to 1e-9 in float64, for any
network they take."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from isoform.generation import Cached, Uncached
from isoform.generation import forward as forward_module
from isoform.native import library
from isoform.nn.compiled import compiled
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
        forwards = [Uncached(model), Cached(model, compile="never")]
        if machine(model):
            forwards.append(Cached(model, compile="always"))
        expected, *found = [forward.begin(tokens, source, NEW + 1) for forward in forwards]
        count = len(prompts)
        for number, (rows, same) in enumerate([*moves, ([], False)]):
            ids = torch.tensor([(i + 3 * number) % 7 for i in range(count)])
            expected, *found = [forward.step(ids) for forward in forwards]
            for each in found:
                torch.testing.assert_close(each, expected, rtol=0, atol=1e-9)
            for forward in forwards if rows else ():
                forward.select(torch.tensor(rows), same_sample=same)
            count = len(rows) or count


def machine(model) -> bool:
    """Whether there is a compiler, and the compiled step takes the network."""
    step, made = forward_module.prepare(model), library(torch.float64)
    return step is not None and made is not None and compiled(step, made) is not None


def test_tables_grow_with_the_rows():
    """Beyond the first 64 positions, and in room that is made as it is needed."""
    with torch.inference_mode():
        for name in ("llama", "original", "gpt2", "t5"):
            model = network(preset(name, **({"max_positions": 200} if name == "gpt2" else {})))
            tokens = Tokens(torch.tensor([[1, 2, 3]]))
            source = None if model.config.source is None else tokens
            flats = [Cached(model, compile="never"), Cached(model, compile="always")]
            whole = Uncached(model)
            for f in (*flats, whole):
                f.begin(tokens, source, 140)
            for i in range(136):
                ids = torch.tensor([i % 19])
                found = [flat.step(ids) for flat in flats if flat._step or flat._machine]
                whole._rows.append(ids)
            expected = whole._logits()
            for each in found:
                torch.testing.assert_close(each, expected, rtol=0, atol=1e-9)


def test_groups_of_equal_rows():
    assert _repeats([0, 0, 1, 1]) == 2
    assert _repeats([3, 3, 3]) == 3
    assert _repeats([0, 1, 2]) == _repeats([]) == 1
    assert _repeats([0, 0, 1]) == _repeats([0, 1, 1]) == 1
