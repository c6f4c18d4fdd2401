"""What comes after the last states, alike under both padding sides."""

from __future__ import annotations

import pytest
import torch

import isoform as iso
from isoform import config
from isoform.nn import pool
from networks import batch, inputs, network, preset, rows
from tolerances import close, off

POOLINGS = ["mean", "first", "last"]
POOLER = config.Pooler(activation="tanh", bias=True)
LABELS = {"n_labels": 5, "bias": True}
HEADS = {
    "sequence": config.SequenceHead(pooling="mean", pooler=POOLER, **LABELS),
    "sequence, bare": config.SequenceHead(pooling="last", pooler=None, **LABELS),
    "tags": config.TaggingHead(dense=POOLER, **LABELS),
    "tags, bare": config.TaggingHead(**LABELS),
    "vector": config.PoolingHead(pooling="first", pooler=POOLER, normalise=True),
    "vector, bare": config.PoolingHead(pooling="mean", pooler=None, normalise=False),
}


# --- pooling ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_pooling_reads_real_tokens_alone(pooling, side):
    tokens = batch(1, side)
    hidden = torch.randn(3, 9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    real = tokens.real
    found = pool(hidden.masked_fill(~real[..., None], torch.nan), real, pooling)
    for b, states in enumerate(hidden[i][real[i]] for i in range(3)):
        expected = {"mean": states.mean(0), "first": states[0], "last": states[-1]}[pooling]
        assert close(found[b], expected)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_pooling_without_padding_is_pooling_with_none(pooling):
    hidden = torch.randn(2, 5, 4, dtype=torch.float64)
    assert close(pool(hidden, None, pooling), pool(hidden, torch.ones(2, 5, dtype=torch.bool), pooling))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_holes_are_passed_over(pooling):
    hidden = torch.arange(4.0).view(1, 4, 1)
    real = torch.tensor([[False, True, False, True]])
    expected = {"mean": 2.0, "first": 1.0, "last": 3.0}[pooling]
    assert pool(hidden, real, pooling).item() == expected


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_row_of_padding_alone_gives_zeros_in_values_and_gradients(pooling):
    hidden = torch.randn(2, 3, 4, requires_grad=True)
    real = torch.tensor([[True, True, False], [False] * 3])
    found = pool(hidden, real, pooling)
    assert (found[1] == 0).all()
    found.square().sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()
    assert (hidden.grad[~real] == 0).all()


# --- heads in a network -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HEADS)
def test_padding_side_and_batch_change_nothing(name):
    model = network(preset("bert").replace(head=HEADS[name]))
    right, left = model(batch(1, "right")), model(batch(1, "left"))
    per_token = name.startswith("tags")

    def results(out, real):
        found = [x for x in (out.logits, out.pooled) if x is not None]
        return [x[real] if per_token else x for x in found]

    sides = [results(right, batch(1, "right").real), results(left, batch(1, "left").real)]
    assert all(close(a, b) for a, b in zip(*sides, strict=True))
    alone = [model(iso.Tokens(torch.tensor([row]))) for row in rows()]
    for i, found in enumerate(sides[0]):
        singles = [results(out, torch.ones(1, out.hidden.shape[1], dtype=torch.bool)) for out in alone]
        assert close(found, torch.cat([s[i] for s in singles]))


def test_sequence_head_is_its_formula():
    model = network(preset("bert").replace(head=HEADS["sequence"]))
    out, head = model(batch()), model.head
    vector = torch.tanh(
        pool(out.hidden, batch().real, "mean") @ head.pooler.dense.weight.T + head.pooler.dense.bias
    )
    assert close(out.pooled, vector)
    assert close(out.logits, vector @ head.labels.weight.T + head.labels.bias)


def test_tagging_head_is_its_formula():
    model = network(preset("bert").replace(head=HEADS["tags"]))
    out, head = model(batch()), model.head
    states = torch.tanh(out.hidden @ head.dense.dense.weight.T + head.dense.dense.bias)
    assert close(out.logits, states @ head.labels.weight.T + head.labels.bias)
    assert out.pooled is None


def test_vectors_have_unit_length_where_asked_for():
    model = network(preset("bert").replace(head=HEADS["vector"]))
    out = model(batch())
    assert out.logits is None
    assert close(out.pooled.norm(dim=-1), torch.ones(3, dtype=torch.float64))
    plain = network(preset("bert").replace(head=HEADS["vector"].replace(normalise=False)))(batch()).pooled
    assert close(out.pooled, plain / plain.norm(dim=-1, keepdim=True))


def test_a_sequence_of_padding_alone_is_finite_under_every_head():
    tokens = batch()
    real = tokens.real.clone()
    real[1] = False
    for head in HEADS.values():
        model = network(preset("bert").replace(head=head))
        out = model(iso.Tokens(tokens.ids, real))
        result = out.pooled if out.logits is None else out.logits
        assert result.isfinite().all()
        result.square().sum().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


# --- scores over tokens -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.5, "inverse_sqrt_d_model"])
def test_token_head_is_its_formula(scale):
    """c tanh((T(h) · s) Eᵀ + b)/c, T(h) = norm(activation(h W + b)), E the embedding's own table."""
    norm = config.Norm(kind="layer", eps=1e-5, bias=True)
    transform = config.Transform(activation="gelu_tanh", bias=True, norm=norm)
    tied = config.TokenHead(tied=True, bias=True, transform=transform, scale=scale, softcap=2.0)
    model = network(preset("bert").replace(head=tied))
    out, head = model(batch()), model.head
    states = head.transform.norm(
        torch.nn.functional.gelu(
            out.hidden @ head.transform.dense.weight.T + head.transform.dense.bias, approximate="tanh"
        )
    )
    factor = 24**-0.5 if scale == "inverse_sqrt_d_model" else 0.5
    scores = (states * factor) @ model.embedding.weight.T + head.bias
    assert close(out.logits, 2.0 * torch.tanh(scores / 2.0))
    assert off(out.logits, scores) > 0.01


def test_masked_token_head():
    """The preset's head scores every position, those masked too, from its own state alone."""
    model = network(preset("bert"))
    out = model(**inputs(model.config))
    assert out.logits.shape == (3, 9, 23)
    assert close(model.head(out.hidden[:, 2]), out.logits[:, 2])


def test_no_head_no_logits():
    out = network(preset("gpt2").replace(head=None))(batch())
    assert out.logits is None
    assert out.pooled is None
    assert out.memory is None
