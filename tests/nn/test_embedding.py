"""lookup × scale → [projection] + positions + token types → norm → dropout → [projection]."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import isoform as iso
from isoform import config
from isoform.errors import ShapeError
from isoform.nn.embedding import Embedding
from networks import batch, network, preset, shake
from tolerances import close, off

D, WIDTH, VOCAB = 8, 6, 23
NORM = config.Norm(kind="layer", eps=1e-3, bias=True)


def embedding(**settings):
    base = {
        "vocabulary": "shared",
        "vocab_size": VOCAB,
        "width": D,
        "positions": config.Learned(max_positions=12, offset=1),
    }
    return shake(Embedding(config.Embedding(**{**base, **settings}), D))


def parts(e, tokens, scale=1.0):
    """Rows of the tables, looked up by hand."""
    ids = tokens.ids if tokens.real is None else torch.where(tokens.real, tokens.ids, 0)
    return e.weight[ids] * scale, e.positions.weight[tokens.positions() + 1]


@pytest.mark.parametrize(("scale", "factor"), [(1.0, 1.0), (2.5, 2.5), ("sqrt_d_model", D**0.5)])
def test_sum(scale, factor):
    """The factor is on the rows, not on the positions (R30, step 2)."""
    e, tokens = embedding(scale=scale), batch()
    rows, positions = parts(e, tokens, factor)
    assert close(e(tokens, tokens.positions()), rows + positions)


def test_norm_of_the_sum():
    e, tokens = embedding(norm=NORM), batch()
    assert close(e(tokens, tokens.positions()), e.norm(sum(parts(e, tokens))))


@pytest.mark.parametrize("bias", [True, False])
def test_projection_before_positions(bias):
    """OPT's: positions and norm have d_model channels."""
    place = config.Projection(place="before_positions", bias=bias)
    e, tokens = embedding(width=WIDTH, projection=place, norm=NORM), batch()
    rows, positions = parts(e, tokens)
    projected = rows @ e.projection.weight.T + (e.projection.bias if bias else 0)
    assert close(e(tokens, tokens.positions()), e.norm(projected + positions))
    assert e.positions.weight.shape == (13, D)


def test_projection_after_the_norm():
    """ALBERT's and ELECTRA's: positions and norm have the table's width."""
    e = embedding(width=WIDTH, projection=config.Projection(place="after_norm", bias=True), norm=NORM)
    tokens = batch()
    inner = e.norm(sum(parts(e, tokens)))
    assert inner.shape[-1] == WIDTH
    assert close(e(tokens, tokens.positions()), inner @ e.projection.weight.T + e.projection.bias)


def test_token_types():
    """Row 0 where none are given, as BERT has it; what stands at padding is not looked up."""
    e, tokens = embedding(n_token_types=3), batch()
    base = sum(parts(e, tokens))
    assert close(e(tokens, tokens.positions()), base + e.token_types[0])
    types = torch.randint(0, 3, tokens.ids.shape).masked_fill(~tokens.real, 99)
    typed = dataclasses.replace(tokens, token_types=types)
    expected = base + e.token_types[types.masked_fill(~tokens.real, 0)]
    assert close(e(typed, tokens.positions()), expected)
    with pytest.raises(ShapeError, match="token type 3 is not in a table of 3 rows"):
        e(dataclasses.replace(tokens, token_types=torch.full_like(types, 3)), tokens.positions())
    with pytest.raises(ShapeError, match="token_types is given, but the embedding has no token types"):
        embedding()(typed, tokens.positions())


def test_sinusoids_are_added_in_the_tables_dtype():
    sinusoids = config.Sinusoidal(
        layout="interleaved", spacing="half_width", offset=0, base=100.0, precision="float64"
    )
    e, tokens = embedding(positions=sinusoids), batch()
    table = e.positions(tokens.positions(), torch.float64)
    ids = tokens.ids.masked_fill(~tokens.real, 0)
    assert close(e(tokens, tokens.positions()), e.weight[ids] + table)
    assert e.bfloat16()(tokens, tokens.positions()).dtype == torch.bfloat16


def test_padding_gets_no_gradient_and_its_ids_are_not_read():
    e, tokens = embedding(), batch()
    e(tokens, tokens.positions())[tokens.real].sum().backward()
    used = set(tokens.ids[tokens.real].tolist())
    reached = {i for i in range(VOCAB) if e.weight.grad[i].abs().sum() > 0}
    assert reached == used
    wild = dataclasses.replace(tokens, ids=tokens.ids.masked_fill(~tokens.real, -(10**9)))
    assert torch.equal(e(wild, tokens.positions()), e(tokens, tokens.positions()))


def test_given_positions_reach_the_table():
    model = network(preset("gpt2"))
    ids = torch.tensor([[3, 4, 5]])
    plain, shifted = (
        model(iso.Tokens(ids)).hidden,
        model(iso.Tokens(ids, position_ids=torch.tensor([[2, 3, 4]]))).hidden,
    )
    assert off(shifted, plain) > 0.01
    model.embedding.positions.weight.data = model.embedding.positions.weight.data.roll(-2, 0)
    assert close(model(iso.Tokens(ids)).hidden, shifted)
