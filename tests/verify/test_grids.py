"""The grids shown are the visibility the network has."""

from __future__ import annotations

import torch

from isoform.config import presets
from isoform.nn import build, capture
from isoform.tokens import Tokens
from isoform.verify.grids import grids

SMALL = {"vocab_size": 20, "d_model": 8, "n_heads": 2, "ffn_width": 12}


def read(model, tokens, source=None):
    """Who read whom, from the attention weights of a run."""
    with torch.no_grad(), capture(model, "*.weights") as seen:
        model(tokens, source)
    return {name: (weights[0, 0] > 0).tolist() for name, weights in seen.items()}


def test_an_encoder_decoder_has_three():
    config = presets.pre_ln(**SMALL, n_encoder_layers=1, n_decoder_layers=2)
    shown = grids(config, length=4, source_length=3)
    assert [(g.stack, g.reads, g.rule, g.layers) for g in shown] == [
        ("encoder", "itself", "bidirectional", (0,)),
        ("decoder", "itself", "causal", (0, 1)),
        ("decoder", "source", "every source position", (0, 1)),
    ]
    seen = read(build(config, seed=0), Tokens(torch.arange(4)[None]), Tokens(torch.arange(3)[None]))
    assert shown[0].allowed == seen["encoder.layers.0.attention.body.weights"]
    assert shown[1].allowed == seen["decoder.layers.1.attention.body.weights"]
    assert shown[2].allowed == seen["decoder.layers.1.cross_attention.body.weights"]


def test_windows_are_shown_by_layer():
    config = presets.llama(**SMALL, n_layers=3, n_kv_heads=1)
    local = config.decoder.layer.attention.replace(window=2)
    config = config.replace(decoder__variants=[{"layers": [1], "attention": local.model_dump()}])
    shown = grids(config, length=5)
    assert [(g.window, g.layers) for g in shown] == [(None, (0, 2)), (2, (1,))]
    seen = read(build(config, seed=0), Tokens(torch.arange(5)[None]))
    for g in shown:
        for i in g.layers:
            assert g.allowed == seen[f"decoder.layers.{i}.attention.body.weights"]


def test_a_prefix_decoder_shows_its_condition():
    config = presets.gpt2(**SMALL, n_layers=1).replace(decoder__visibility="prefix")
    (shown,) = grids(config, length=5, prefix=3)
    assert (shown.rule, shown.prefix) == ("prefix", 3)
    tokens = Tokens(torch.arange(5)[None], prefix=torch.tensor([3]))
    assert shown.allowed == read(build(config, seed=0), tokens)["decoder.layers.0.attention.body.weights"]


def test_a_bidirectional_window_reaches_both_ways():
    config = presets.bert(**SMALL, n_layers=1).replace(encoder__layer__attention__window=2)
    (shown,) = grids(config, length=5)
    seen = read(build(config, seed=0), Tokens(torch.arange(5)[None]))
    assert shown.allowed == seen["encoder.layers.0.attention.body.weights"]
    assert shown.allowed[2] == [False, True, True, True, False]
