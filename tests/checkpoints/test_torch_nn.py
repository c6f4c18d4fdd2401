"""torch.nn.Transformer and its encoder agree with the network filled from them, forward and backward."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from isoform.checkpoints import from_torch, to_torch
from isoform.config import presets
from isoform.errors import ArtifactError
from isoform.nn import build
from isoform.nn.stack import Memory, Sides
from isoform.tokens import Tokens
from isoform.visibility import Places

GRID = list(itertools.product([False, True], ["relu", "gelu"], [True, False], [True, False]))


def shaken(module: nn.Module) -> Any:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=generator), alpha=0.3)
    return module.double().eval()


def sides(lengths: tuple[int, ...]) -> tuple[Sides, torch.Tensor]:
    tokens = Tokens.from_lists([[0] * n for n in lengths], pad_id=0)
    places = Places.of(tokens)
    return Sides(places, places, tokens.positions()), tokens.real_or_ones()


def agree(a: torch.Tensor, b: torch.Tensor) -> None:
    assert (a - b).abs().max().item() <= 1e-10 * max(1.0, b.abs().max().item())


@pytest.mark.parametrize(("pre", "activation", "bias", "final"), GRID)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_encoder(pre: bool, activation: str, bias: bool, final: bool) -> None:
    layer = nn.TransformerEncoderLayer(
        24, 3, 20, 0.1, activation, 1e-3, batch_first=True, norm_first=pre, bias=bias
    )
    norm = nn.LayerNorm(24, 1e-3, bias=bias) if final else None
    theirs = shaken(nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False))
    ours = from_torch(theirs).eval()
    places, real = sides((7, 4, 1))
    x = torch.randn(3, 7, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    found = ours.encoder(a, places)[real]
    expected = theirs(b, src_key_padding_mask=~real)[real]
    agree(found, expected)
    weight = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    agree(a.grad[real], b.grad[real])
    agree(
        ours.encoder.layers[0].attention.body.qkv.weight.grad, theirs.layers[0].self_attn.in_proj_weight.grad
    )
    agree(ours.encoder.layers[1].feed_forward.body.up.weight.grad, theirs.layers[1].linear1.weight.grad)
    back = to_torch(ours)
    before, after = theirs.state_dict(), back.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(("pre", "bias"), list(itertools.product([False, True], [True, False])))
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_encoder_decoder(pre: bool, bias: bool) -> None:
    theirs = shaken(
        nn.Transformer(
            24, 3, 2, 3, 20, 0.1, "gelu", batch_first=True, norm_first=pre, layer_norm_eps=1e-3, bias=bias
        )
    )
    ours = from_torch(theirs).eval()
    source_sides, source_real = sides((5, 2, 6))
    target_sides, target_real = sides((7, 4, 1))
    generator = torch.Generator().manual_seed(1)
    source = torch.randn(3, 6, 24, dtype=torch.float64, generator=generator)
    target = torch.randn(3, 7, 24, dtype=torch.float64, generator=generator)
    memory = Memory(ours.encoder(source, source_sides), source_sides.key)
    found = ours.decoder(target, target_sides, memory=memory)[target_real]
    causal = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64) != 0
    expected = theirs(
        source, target, tgt_mask=causal, src_key_padding_mask=~source_real, tgt_key_padding_mask=~target_real,
        memory_key_padding_mask=~source_real,
    )[target_real]  # fmt: skip
    agree(found, expected)
    back = to_torch(ours)
    before, after = theirs.state_dict(), back.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_it_cannot_say() -> None:
    def net(**changes: Any) -> Any:
        base = presets.torch_nn(
            20, d_model=12, n_heads=3, ffn_width=8, n_encoder_layers=1, n_decoder_layers=1
        )
        return build(base.replace(**changes), seed=0)

    to_torch(net())
    for changes, message in (
        ({"encoder__layer__residual_scale": 0.5}, r"encoder\.layer\.residual_scale = 0\.5"),
        ({"decoder__layer__attention__window": 3}, r"decoder\.layer\.attention\.window = 3"),
        ({"encoder__layer__feed_forward__activation": "mish"}, r"encoder\.layer\.feed_forward"),
    ):
        with pytest.raises(ArtifactError, match=message):
            to_torch(net(**changes))


def test_what_it_does_not_read() -> None:
    layer = nn.TransformerDecoderLayer(12, 3, 8, batch_first=True)
    with pytest.raises(ArtifactError, match="cannot stand alone"):
        from_torch(nn.TransformerDecoder(layer, 1))
    odd = nn.TransformerEncoderLayer(12, 3, 8, activation=torch.tanh, batch_first=True)
    with pytest.raises(ArtifactError, match=r"activation .* is not supported"):
        from_torch(nn.TransformerEncoder(odd, 1, enable_nested_tensor=False))
