"""Every dropout acts in training and in training alone (R33); rounded ALiBi is the published one."""

from __future__ import annotations

import math

import pytest
import torch

from isoform.config import Alibi, presets
from isoform.nn import build
from isoform.nn.biases import AlibiBias
from isoform.tokens import Tokens

BERT = presets.bert(50, d_model=8, n_heads=2, ffn_width=16, n_layers=1, dropout=0.0)
LABELS = {"n_labels": 3, "bias": True}
SEQUENCE = {"kind": "sequence_labels", "pooling": "first", "pooler": None, **LABELS}
ALBERT = presets.albert(50, d_model=8, embedding_width=4, n_heads=2, ffn_width=16, n_layers=1)
T5 = presets.t5(50, d_model=8, n_heads=2, head_width=4, ffn_width=16, n_layers=1, dropout=0.0)
TOKENS = Tokens(torch.arange(12).view(2, 6) + 3)


def outputs(config, weights, *, training):
    model = build(config)
    if weights is not None:
        model.load_state_dict(weights)
    model.train(training)
    torch.manual_seed(0)
    out = model(TOKENS, **({"source": TOKENS} if config.source else {}))
    return model.state_dict(), out.hidden if out.logits is None else out.logits


@pytest.mark.parametrize(
    ("base", "field"),
    [
        (BERT, "embedding.dropout"),
        (BERT, "encoder.layer.residual_dropout"),
        (BERT, "encoder.layer.attention.dropout"),
        (BERT, "encoder.layer.feed_forward.dropout"),
        (BERT, "encoder.final_dropout"),
        (ALBERT, "embedding.dropout"),
        (T5, "encoder.final_dropout"),
        (T5, "decoder.final_dropout"),
        (T5, "decoder.layer.cross_attention.dropout"),
        (T5, "source.dropout"),
        (BERT.replace(head=SEQUENCE), "head.input_dropout"),
        (BERT.replace(head=SEQUENCE), "head.dropout"),
        (BERT.replace(head={"kind": "token_labels", **LABELS}), "head.dropout"),
    ],
)
def test_each_dropout_acts_in_training_alone(base, field):
    weights, still = outputs(base, None, training=False)
    dropping = base.replace(**{field: 0.75})
    torch.testing.assert_close(outputs(dropping, weights, training=False)[1], still, rtol=0, atol=0)
    torch.testing.assert_close(outputs(base, weights, training=True)[1], still, rtol=0, atol=0)
    assert not torch.allclose(outputs(dropping, weights, training=True)[1], still, atol=1e-3)


@pytest.mark.parametrize("residual", ["sequential", "parallel"])
@pytest.mark.parametrize("kept", ["attention", "feed_forward"])
def test_dropout_on_one_kind_of_increment(residual, kept):
    """With the other kind's increments made zero, nothing is left to drop."""
    config = presets.gpt_neox(50, d_model=8, n_heads=2, ffn_width=16, n_layers=1, rotary_share=0.5).replace(
        decoder__layer__residual=residual, decoder__layer__residual_dropout=0.75
    )
    only = config.replace(decoder__layer__residual_dropout_on=kept)
    model = build(only)
    silent = "feed_forward" if kept == "attention" else "attention"
    spared = {n: p for n, p in model.named_parameters() if f"layers.0.{kept}." in n and "norm" not in n}
    assert spared
    with torch.no_grad():
        for parameter in spared.values():
            parameter.zero_()
    torch.manual_seed(0)
    trained = model.train()(TOKENS).hidden
    torch.testing.assert_close(trained, model.eval()(TOKENS).hidden, rtol=0, atol=0)
    other = build(config.replace(decoder__layer__residual_dropout_on=silent))
    other.load_state_dict(model.state_dict())
    assert not torch.allclose(other.train()(TOKENS).hidden, trained, atol=1e-3)


def test_embedding_dropout_stands_before_a_projection_after_the_norm():
    """ALBERT and ELECTRA drop channels of the table's width, so whole directions go missing after the map."""
    config = ALBERT.replace(embedding__dropout=0.5)
    embedding = build(config).train().embedding
    with torch.no_grad():
        embedding.projection.weight.copy_(torch.eye(8, 4))
        embedding.projection.bias.fill_(1.0)
    out = embedding(TOKENS, TOKENS.positions())
    assert (out[..., 4:] == 1.0).all()
    assert 0 < (out[..., :4] == 1.0).float().mean() < 1


@pytest.mark.parametrize("n_heads", [1, 4, 12])
@pytest.mark.parametrize(("rounding", "family"), [("bfloat16", "falcon"), ("float32", "bloom")])
def test_rounded_alibi(n_heads, rounding, family):
    """Bit for bit the bias that `transformers` adds."""
    pytest.importorskip("transformers")
    module = __import__(f"transformers.models.{family}.modeling_{family}", fromlist=["build_alibi_tensor"])
    real = torch.ones(2, 300, dtype=torch.long)
    real[0, :5] = 0
    theirs = module.build_alibi_tensor(real, n_heads, torch.float64).view(2, n_heads, 1, 300) / math.sqrt(4)
    places = (real.cumsum(-1) - 1) * real
    bias = AlibiBias(Alibi(factor=0.5, rounding=rounding), n_heads, places[:, :3], places)
    ours = bias.dense(torch.float64)
    torch.testing.assert_close(ours, theirs.expand(-1, -1, 3, -1), rtol=0, atol=0)
