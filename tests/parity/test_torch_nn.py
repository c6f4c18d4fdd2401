"""`torch.nn.TransformerEncoder` with copied weights: forward and gradients to 1e-10 in float64 (R40)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from isoform.config import Norm, presets
from isoform.nn import build
from isoform.tokens import Tokens

D, H, F, LAYERS = 24, 6, 40, 2


def twins(norm_first: bool, activation: str):
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(
        D, H, F, 0.0, activation, batch_first=True, norm_first=norm_first, dtype=torch.float64
    )
    theirs = nn.TransformerEncoder(
        layer, LAYERS, nn.LayerNorm(D, dtype=torch.float64), enable_nested_tensor=False
    )
    for p in theirs.parameters():
        p.data += 0.3 * torch.randn_like(p)
    cfg = presets.bert(30, d_model=D, n_heads=H, ffn_width=F, n_layers=LAYERS, dropout=0.0, eps=1e-5)
    stack = cfg.encoder.replace(
        final_norm=Norm(kind="layer", eps=1e-5, bias=True),
        layer__placement="pre" if norm_first else "post",
        layer__feed_forward__activation=activation,
    )
    ours = build(cfg.replace(encoder=stack), seed=0).double().encoder
    place = "before" if norm_first else "after_sum"
    with torch.no_grad():
        for mine, other in zip(ours.layers, theirs.layers, strict=True):
            body = mine.attention.body
            body.qkv.weight.copy_(other.self_attn.in_proj_weight)
            body.qkv.bias.copy_(other.self_attn.in_proj_bias)
            body.output.load_state_dict(other.self_attn.out_proj.state_dict())
            mine.feed_forward.body.up.load_state_dict(other.linear1.state_dict())
            mine.feed_forward.body.down.load_state_dict(other.linear2.state_dict())
            getattr(mine.attention, place).load_state_dict(other.norm1.state_dict())
            getattr(mine.feed_forward, place).load_state_dict(other.norm2.state_dict())
        ours.final_norm.load_state_dict(theirs.norm.state_dict())
    return ours, theirs


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder(norm_first: bool, activation: str, side: str) -> None:
    from isoform.nn.model import Sides
    from isoform.visibility import Places

    ours, theirs = twins(norm_first, activation)
    tokens = Tokens.from_lists([[1] * 7, [1] * 3, [1] * 5], pad_id=0, side=side)
    real = tokens.real_or_ones()
    x = torch.randn(3, 7, D, dtype=torch.float64)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    places = Places.of(tokens)
    mine = ours(a, Sides(places, places, tokens.positions()))
    other = theirs(b, src_key_padding_mask=~real)
    weight = torch.randn_like(mine) * real[..., None]
    (mine * weight).sum().backward()
    (other * weight).sum().backward()
    assert (mine - other)[real].abs().max() < 1e-10
    assert (a.grad - b.grad)[real].abs().max() < 1e-10
    for number, (m, o) in enumerate(zip(ours.layers, theirs.layers, strict=True)):
        gap = (m.attention.body.qkv.weight.grad - o.self_attn.in_proj_weight.grad).abs().max()
        assert gap < 1e-10, number
