"""`torch.nn.TransformerEncoder`, `TransformerDecoder` and `Transformer` with copied weights (R40).

Forward, and the gradient of every input and every parameter, to 1e-10 in float64: Post-LN and Pre-LN, ragged
padding on either side, causal and cross visibility, a padded memory.
"""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from isoform.config import presets
from isoform.nn import Stack, build
from isoform.nn.stack import Memory, Sides
from isoform.places import Places
from isoform.tokens import Tokens
from isoform.visibility import Bidirectional, Causal, Cross, Padding, Visibility
from networks import shake
from tolerances import PARITY

D, H, F, LAYERS = 24, 6, 40, 2
TARGET, SOURCE = (7, 3, 5), (4, 6, 1)
Side = Literal["right", "left"]
Pairs = list[tuple[Tensor, Tensor]]
EVERY = slice(None)

both_sides = pytest.mark.parametrize("side", ["right", "left"])
activations = pytest.mark.parametrize("activation", ["relu", "gelu"])
placements = pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
quiet = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")


def theirs_of(norm_first: bool, activation: str) -> nn.Transformer:
    """Biases, gains and final norms included, nothing at its first value."""
    module = nn.Transformer(
        D, H, LAYERS, LAYERS, F, 0.0, activation, batch_first=True, norm_first=norm_first, layer_norm_eps=1e-3
    )
    shaken = shake(module, seed=1)
    assert isinstance(shaken, nn.Transformer)
    return shaken


def ours_of(norm_first: bool, activation: str) -> tuple[Stack, Stack]:
    cfg = presets.torch_nn(
        30, d_model=D, n_heads=H, ffn_width=F, n_encoder_layers=LAYERS, n_decoder_layers=LAYERS, dropout=0.0
    )
    changes = {
        f"{stack}.{field}": value
        for stack in ("encoder", "decoder")
        for field, value in (
            ("layer.placement", "pre" if norm_first else "post"),
            ("layer.feed_forward.activation", activation),
            ("layer.norm.eps", 1e-3),
            ("final_norm.eps", 1e-3),
        )
    }
    model = build(cfg.replace(**changes), seed=0).double()
    assert model.encoder is not None
    assert model.decoder is not None
    return model.encoder, model.decoder


def pairs(ours: Stack, theirs: Any) -> list[tuple[nn.Parameter, nn.Parameter, slice]]:
    """(ours, theirs, which of its rows) of every parameter; written out here, not by the library."""
    found: list[tuple[nn.Parameter, nn.Parameter, slice]] = []

    def both(mine: Any, other: Any) -> None:
        found.extend([(mine.weight, other.weight, EVERY), (mine.bias, other.bias, EVERY)])

    def projections(mine: Any, other: Any) -> None:
        cut = {mine.query: slice(0, D), mine.key_value: slice(D, None)} if mine.cross else {mine.qkv: EVERY}
        for linear, rows in cut.items():
            found.append((linear.weight, other.in_proj_weight, rows))
            found.append((linear.bias, other.in_proj_bias, rows))
        both(mine.output, other.out_proj)

    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        place = "before" if other.norm_first else "after_sum"
        residuals = [(mine.attention, other.self_attn), (mine.feed_forward, None)]
        if mine.cross_attention is not None:
            residuals.insert(1, (mine.cross_attention, other.multihead_attn))
        for number, (residual, attention) in enumerate(residuals, start=1):
            both(getattr(residual, place), getattr(other, f"norm{number}"))
            if attention is not None:
                projections(residual.body, attention)
        both(mine.feed_forward.body.up, other.linear1)
        both(mine.feed_forward.body.down, other.linear2)
    both(ours.final_norm, theirs.norm)
    assert {id(p) for p, _, _ in found} == {id(p) for p in ours.parameters()}
    return found


def twins(norm_first: bool, activation: str) -> tuple[tuple[Stack, Stack], nn.Transformer]:
    theirs, ours = theirs_of(norm_first, activation), ours_of(norm_first, activation)
    with torch.no_grad():
        for stack, other in zip(ours, (theirs.encoder, theirs.decoder), strict=True):
            for mine, value, rows in pairs(stack, other):
                mine.copy_(value[rows])
    return ours, theirs


def gradients(ours: Stack, theirs: Any) -> Pairs:
    """Those of all parameters, paired."""
    return [(given(mine), given(other)[rows]) for mine, other, rows in pairs(ours, theirs)]


def given(tensor: Tensor) -> Tensor:
    """The gradient that arrived."""
    assert tensor.grad is not None
    return tensor.grad


def states(lengths: tuple[int, ...], seed: int, side: Side) -> tuple[Tensor, Tensor, Sides, Tensor]:
    """The same random states twice, where they stand, and which are real."""
    generator = torch.Generator().manual_seed(seed)
    tokens = Tokens.from_lists([[1] * n for n in lengths], pad_id=0, side=side)
    x = torch.randn(*tokens.ids.shape, D, dtype=torch.float64, generator=generator)
    places = Places.of(tokens)
    real = tokens.real_or_ones()
    return (
        x.clone().requires_grad_(),
        x.clone().requires_grad_(),
        Sides(places, places, tokens.positions()),
        real,
    )


def mask(rule: Visibility, query: Places, key: Places) -> Tensor:
    """Theirs, True = must not read. Padded queries read all: with nothing to read they are NaN there."""
    allowed = (rule & Padding()).on(query, key)
    assert query.real is not None
    opened = type(allowed)(allowed.matrix | ~query.real[:, :, None])
    return opened.multihead(H)


def backward(mine: Tensor, other: Tensor, real: Tensor) -> None:
    """One random functional of the real positions; what is at the others must not matter."""
    generator = torch.Generator().manual_seed(9)
    weight = torch.randn(mine.shape, dtype=mine.dtype, generator=generator)
    (mine * weight)[real].sum().backward()
    (other * weight)[real].sum().backward()


def agree(found: Pairs) -> None:
    for number, (a, b) in enumerate(found):
        largest = float(b.detach().abs().max())
        assert largest > 1e-6, f"nothing to compare in pair {number}"
        assert (a - b).abs().max() <= PARITY * max(1.0, largest), f"pair {number}"


@both_sides
@activations
@placements
@quiet
def test_encoder(norm_first: bool, activation: str, side: Side) -> None:
    (ours, _), whole = twins(norm_first, activation)
    theirs = whole.encoder
    a, b, sides, real = states(TARGET, 1, side)
    mine, other = ours(a, sides), theirs(b, src_key_padding_mask=~real)
    backward(mine, other, real)
    agree([(mine[real], other[real]), (given(a)[real], given(b)[real]), *gradients(ours, theirs)])


@both_sides
@activations
@placements
@quiet
def test_decoder(norm_first: bool, activation: str, side: Side) -> None:
    """Causal, and reading a memory whose padding is on the same side."""
    (_, ours), whole = twins(norm_first, activation)
    theirs = whole.decoder
    a, b, sides, real = states(TARGET, 1, side)
    c, e, source, present = states(SOURCE, 2, side)
    mine = ours(a, sides, memory=Memory(c, source.key))
    other = theirs(
        b,
        e,
        tgt_mask=mask(Causal(), sides.query, sides.query),
        memory_mask=mask(Cross(), sides.query, source.key),
    )
    backward(mine, other, real)
    agree(
        [
            (mine[real], other[real]),
            (given(a)[real], given(b)[real]),
            (given(c)[present], given(e)[present]),
            *gradients(ours, theirs),
        ]
    )
    assert (given(c)[~present] == 0).all()


@activations
@placements
@quiet
def test_decoder_called_as_its_manual_says(norm_first: bool, activation: str) -> None:
    """The square mask and key padding masks (True = padding), with the usual padding on the right."""
    (_, ours), whole = twins(norm_first, activation)
    theirs = whole.decoder
    a, b, sides, real = states(TARGET, 1, "right")
    c, e, source, present = states(SOURCE, 2, "right")
    mine = ours(a, sides, memory=Memory(c, source.key))
    triangle = nn.Transformer.generate_square_subsequent_mask(max(TARGET), dtype=torch.float64)
    other = theirs(
        b, e, tgt_mask=triangle != 0, tgt_key_padding_mask=~real, memory_key_padding_mask=~present
    )  # fmt: skip
    agree([(mine[real], other[real])])


@both_sides
@activations
@placements
@quiet
def test_transformer(norm_first: bool, activation: str, side: Side) -> None:
    """The whole: the decoder's gradient goes on into the encoder."""
    ours, theirs = twins(norm_first, activation)
    a, b, source, present = states(SOURCE, 3, side)
    c, e, target, real = states(TARGET, 4, side)
    memory = Memory(ours[0](a, source), source.key)
    mine = ours[1](c, target, memory=memory)
    other = theirs(
        b,
        e,
        src_mask=mask(Bidirectional(), source.query, source.query),
        tgt_mask=mask(Causal(), target.query, target.query),
        memory_mask=mask(Cross(), target.query, source.key),
    )
    backward(mine, other, real)
    agree(
        [
            (mine[real], other[real]),
            (given(a)[present], given(b)[present]),
            (given(c)[real], given(e)[real]),
            *gradients(ours[0], theirs.encoder),
            *gradients(ours[1], theirs.decoder),
        ]
    )
