"""`trace` against what the network itself computes; attention weights of any layer and head (R36)."""

from __future__ import annotations

import math

import pytest
import torch

from isoform.config import presets
from isoform.errors import ConfigError
from isoform.nn import build, capture
from isoform.tokens import Tokens
from isoform.verify.trace import trace

TOKENS = Tokens(torch.tensor([[3, 1, 4, 1, 5]]))
SOURCE = Tokens(torch.tensor([[9, 2, 6]]))


def decoder(**changes):
    config = presets.llama(vocab_size=13, d_model=8, n_heads=2, n_kv_heads=1, ffn_width=12, n_layers=3)
    return build(config.replace(**changes), seed=1).double()


def translator(preset=presets.pre_ln):
    config = preset(vocab_size=13, d_model=8, n_heads=2, ffn_width=12, n_encoder_layers=1, n_decoder_layers=2)
    return build(config, seed=1).double()


def surrounded(tokens: Tokens, by: int, side: str) -> Tokens:
    shape = (by, 0) if side == "left" else (0, by)
    ids = torch.nn.functional.pad(tokens.ids, shape)
    return Tokens(ids, torch.nn.functional.pad(torch.ones_like(tokens.ids), shape).bool())


def rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


def test_streams_and_increments_are_the_networks_own():
    model = decoder()
    with torch.no_grad(), capture(model, "*") as seen:
        model(TOKENS)
    found = trace(model, TOKENS)
    assert [(s.layer, s.kind) for s in found.sublayers] == [
        (i, kind) for i in range(3) for kind in ("attention", "feed_forward")
    ]
    for s in found.sublayers:
        path = f"decoder.layers.{s.layer}.{s.kind}"
        assert s.shape == (1, 5, 8)
        assert s.stream == pytest.approx(rms(seen[f"{path}.output"]), rel=1e-12)
        assert s.increment == pytest.approx(rms(seen[f"{path}.increment"]), rel=1e-12)
        if s.kind == "attention":
            weights = seen[f"{path}.body.weights"][0]
            assert torch.equal(found.weights["decoder", s.layer], weights)
            assert s.entropy == pytest.approx(
                torch.special.entr(weights).sum(-1).mean(-1).tolist(), rel=1e-12
            )
        else:
            assert s.entropy == ()


def test_guesses_of_a_layer_are_those_of_the_network_cut_there():
    model = decoder()
    found = trace(model, TOKENS, top=4)
    assert len(found.guesses) == 3
    for depth in (1, 2, 3):
        short = build(model.config.replace(decoder__n_layers=depth), seed=0).double()
        short.load_state_dict({k: v for k, v in model.state_dict().items() if k in short.state_dict()})
        with torch.no_grad():
            best = short(TOKENS).logits[0].softmax(-1).topk(4)
        guesses = found.guesses[depth - 1]
        assert [[g.id for g in place] for place in guesses] == best.indices.tolist()
        assert [g.probability for g in guesses[2]] == pytest.approx(best.values[2].tolist(), rel=1e-12)


@pytest.mark.parametrize("preset", [presets.original, presets.pre_ln])
def test_an_encoder_decoder_shows_all_three_kinds_of_attention(preset):
    found = trace(translator(preset), TOKENS, SOURCE)
    assert [(s.stack, s.layer, s.kind) for s in found.sublayers] == [
        ("encoder", 0, "attention"),
        ("encoder", 0, "feed_forward"),
        *(
            ("decoder", i, kind)
            for i in range(2)
            for kind in ("attention", "cross_attention", "feed_forward")
        ),
    ]
    assert found.sublayers[0].shape == (1, 3, 8)
    assert found.ids == (3, 1, 4, 1, 5) and found.source_ids == (9, 2, 6)
    assert found.attention("cross", 1, 0).shape == (5, 3)
    assert found.attention("encoder", 0, 1).shape == (3, 3)
    assert len(found.guesses) == 2 and len(found.guesses[0]) == 5


def test_padding_is_left_out_on_either_side():
    model = translator()
    plain = trace(model, TOKENS, SOURCE)
    for side in ("left", "right"):
        padded = trace(model, surrounded(TOKENS, 2, side), surrounded(SOURCE, 1, side))
        assert padded.ids == plain.ids and padded.source_ids == plain.source_ids
        for key, weights in plain.weights.items():
            assert torch.allclose(padded.weights[key], weights, atol=1e-12), key
        for a, b in zip(plain.sublayers, padded.sublayers, strict=True):
            assert (a.stream, a.increment) == pytest.approx((b.stream, b.increment), rel=1e-9)
        for a, b in zip(plain.guesses, padded.guesses, strict=True):
            assert [[g.id for g in p] for p in a] == [[g.id for g in p] for p in b]


def test_shared_layers_are_seen_at_each_of_their_places():
    model = decoder(decoder__layer_sharing=[0, 0, 2])
    first, second = (s for s in trace(model, TOKENS).sublayers if s.kind == "feed_forward" and s.layer < 2)
    short = build(model.config.replace(decoder__n_layers=1, decoder__layer_sharing=None), seed=0).double()
    short.load_state_dict({k: v for k, v in model.state_dict().items() if k in short.state_dict()})
    alone = trace(short, TOKENS).sublayers[1]
    assert first.stream == pytest.approx(alone.stream, rel=1e-12)
    assert abs(first.stream - second.stream) > 1e-6


def test_a_parallel_layer_is_one_update():
    config = presets.gpt_neox(vocab_size=13, d_model=8, n_heads=2, ffn_width=12, n_layers=2, rotary_share=0.5)
    found = trace(build(config, seed=1), TOKENS)
    assert [s.kind for s in found.sublayers] == ["parallel", "parallel"]
    assert len(found.sublayers[0].entropy) == 2


def test_uniform_attention_has_the_entropy_of_its_length():
    model = decoder()
    for block in model.decoder.layers:
        block.attention.body.qkv.weight.data.zero_()
    for s in trace(model, TOKENS).sublayers[::2]:
        assert s.entropy == pytest.approx([sum(math.log(n) for n in range(1, 6)) / 5] * 2, rel=1e-12)


def test_a_network_without_a_token_head_makes_no_guesses():
    config = presets.bert(vocab_size=13, d_model=8, n_heads=2, ffn_width=12, n_layers=1)
    found = trace(build(config.replace(head=None), seed=1), TOKENS)
    assert found.guesses == () and ("encoder", 0) in found.weights


def test_mode_is_restored_and_dropout_is_off():
    model = translator()
    model.train()
    first, second = trace(model, TOKENS, SOURCE), trace(model, TOKENS, SOURCE)
    assert model.training and first.sublayers == second.sublayers


def test_what_is_not_there_is_named():
    found = trace(decoder(), TOKENS)
    with pytest.raises(ConfigError, match="has no cross-attention; this network has decoder"):
        found.attention("cross", 0, 0)
    with pytest.raises(ConfigError, match=r"layer 3 has no decoder self-attention; .* in layers 0 to 2$"):
        found.attention("decoder", 3, 0)
    wanted = (
        "layer 5 has no cross-attention; this network has encoder self-attention in layer 0, decoder "
        "self-attention in layers 0 to 1, cross-attention in layers 0 to 1"
    )
    with pytest.raises(ConfigError, match=f"^{wanted}$"):
        trace(translator(), TOKENS, SOURCE).attention("cross", 5, 0)
    with pytest.raises(ConfigError, match="no head 2 in layer 0; heads 0 to 1"):
        found.attention("decoder", 0, 2)
    with pytest.raises(ConfigError, match="one text at a time"):
        trace(decoder(), Tokens(torch.zeros(2, 3, dtype=torch.long)))
