"""R23, R30, R34: sums over supervised positions and their number, one shift, no leak, two losses."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from isoform.config import SequenceHead, TaggingHead, presets
from isoform.data.batching import Batch, LabelledBatch
from isoform.errors import ConfigError, SupervisionError
from isoform.nn import build
from isoform.nn.experts import Router
from isoform.tokens import Tokens
from isoform.training import loss as losses
from isoform.training.loss import Work, batch_loss, smoothed_cross_entropy
from isoform.training.supervision import check_fit, check_shift, check_supervision
from training import toys


def one_batch() -> Batch:
    return next(toys.pairs(6, max_tokens=200).epoch(0))


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.6])
def test_cross_entropy_is_that_of_the_smoothed_distribution(smoothing: float) -> None:
    torch.manual_seed(0)
    scores = torch.randn(7, 11, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 11, (7,))
    # (1 - eta) onehot + eta u, spelled out (R34)
    q = (1 - smoothing) * F.one_hot(labels, 11).double() + smoothing / 11
    expected = -(q * scores.log_softmax(-1)).sum()
    (wanted,) = torch.autograd.grad(expected, scores)
    loss, nll = smoothed_cross_entropy(scores, labels, smoothing)
    (found,) = torch.autograd.grad(3.0 * loss, scores)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(found, 3.0 * wanted, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(nll, F.cross_entropy(scores, labels, reduction="sum"), rtol=1e-13, atol=0)
    assert not nll.requires_grad


def test_half_precision_scores_are_widened() -> None:
    scores = torch.randn(300, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = torch.arange(300) % 5
    loss, _ = smoothed_cross_entropy(scores, labels, 0.0)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(scores.float(), labels, reduction="sum"))


def test_only_supervised_positions_count() -> None:
    batch, model = one_batch(), toys.pair_model(dtype=torch.float64)
    sums = batch_loss(model, batch, smoothing=0.1)
    logits = model(batch.decoder_input, batch.source).logits
    kept = logits[batch.supervised].log_softmax(-1)
    labels = batch.labels[batch.supervised]
    nll = -kept.gather(1, labels[:, None]).sum()
    assert sums.count == int(batch.supervised.sum()) < batch.supervised.numel()
    torch.testing.assert_close(sums.nll, nll, rtol=1e-12, atol=0)
    torch.testing.assert_close(sums.loss, 0.9 * nll - 0.1 * kept.mean(-1).sum(), rtol=1e-12, atol=0)
    assert sums.balance == 0


def test_only_supervised_states_reach_the_output_matrix() -> None:
    batch, model = one_batch(), toys.pair_model()
    shapes: list[torch.Size] = []
    assert model.head is not None
    model.head.register_forward_hook(lambda module, inputs, output: shapes.append(output.shape))
    sums = batch_loss(model, batch)
    assert shapes == [(sums.count, toys.VOCABULARY)]


def test_labels_of_padding_change_nothing() -> None:
    batch, model = one_batch(), toys.pair_model(dtype=torch.float64)
    other = dataclasses.replace(batch, labels=torch.where(batch.supervised, batch.labels, 7))
    assert not torch.equal(batch.labels, other.labels)
    assert batch_loss(model, batch).loss == batch_loss(model, other).loss


def test_pieces_give_the_same_loss_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = one_batch()
    grads: list[list[Tensor]] = []
    values: list[Tensor] = []
    for chunk in (losses.CHUNK, 3 * toys.VOCABULARY):
        monkeypatch.setattr(losses, "CHUNK", chunk)
        model = toys.pair_model(dtype=torch.float64)
        sizes: list[int] = []
        assert model.head is not None
        model.head.register_forward_hook(lambda m, i, output, sizes=sizes: sizes.append(len(output)))
        sums = batch_loss(model, batch, smoothing=0.2)
        sums.loss.backward()
        values.append(torch.stack([sums.loss.detach(), sums.nll]))
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    assert max(sizes) == 3 and sum(sizes) == sums.count  # scored once
    torch.testing.assert_close(values[0], values[1], rtol=1e-13, atol=0)
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("frozen", ["head", "body"])
def test_pieces_of_what_is_frozen(frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = one_batch()
    grads: list[list[Tensor | None]] = []
    for chunk in (losses.CHUNK, 3 * toys.VOCABULARY):
        monkeypatch.setattr(losses, "CHUNK", chunk)
        model = toys.pair_model(dtype=torch.float64)
        assert model.head is not None
        learnt = {id(p) for p in model.head.parameters()}
        for p in model.parameters():
            p.requires_grad_((id(p) in learnt) == (frozen == "body"))
        batch_loss(model, batch, z_loss=1e-2).loss.backward()
        grads.append([p.grad for p in model.parameters()])
    assert any(a is None for a in grads[0]) and any(a is not None for a in grads[0])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-14)


def test_pieces_can_be_gone_through_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "CHUNK", 3 * toys.VOCABULARY)
    model = toys.pair_model(dtype=torch.float64)
    loss = batch_loss(model, one_batch()).loss
    once = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
    thrice = torch.autograd.grad(3 * loss, [*model.parameters()])
    torch.testing.assert_close([3 * g for g in once], list(thrice), rtol=1e-12, atol=1e-14)


def test_pieces_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alike to what bfloat16 rounds; the gradients in float32, as without pieces."""
    batch = one_batch()
    grads: list[list[Tensor]] = []
    for chunk in (losses.CHUNK, 3 * toys.VOCABULARY):
        monkeypatch.setattr(losses, "CHUNK", chunk)
        model = toys.pair_model()
        with torch.autocast("cpu", torch.bfloat16):
            loss = batch_loss(model, batch).loss
        loss.backward()
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    for a, b in zip(*grads, strict=True):
        assert a.dtype == b.dtype == torch.float32
        assert (a - b).norm() <= 2**-7 * a.norm()


def test_nothing_is_learnt_piece_by_piece_either(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, model = one_batch(), toys.pair_model(dtype=torch.float64)
    with torch.no_grad():
        expected = batch_loss(model, batch)
        monkeypatch.setattr(losses, "CHUNK", 3 * toys.VOCABULARY)
        found = batch_loss(model, batch)
    assert not found.loss.requires_grad
    torch.testing.assert_close([found.loss, found.nll], [expected.loss, expected.nll], rtol=1e-13, atol=0)


def test_sequence_labels() -> None:
    cfg = presets.bert(
        toys.VOCABULARY, d_model=12, n_heads=3, ffn_width=20, n_layers=1, dropout=0.0, head=None
    )
    cfg = cfg.replace(head=SequenceHead(n_labels=3, pooling="mean", pooler=None, bias=True))
    model = build(cfg, seed=0).double()
    batch = next(toys.classes().epoch(0))
    skipped = dataclasses.replace(batch, supervised=torch.arange(len(batch.rows)) != 1)
    logits = model(batch.tokens).logits
    keep = skipped.supervised
    expected = F.cross_entropy(logits[keep], batch.labels[keep], reduction="sum")
    sums = batch_loss(model, skipped)
    assert sums.count == len(batch.rows) - 1
    torch.testing.assert_close(sums.loss, expected, rtol=1e-12, atol=0)


def tagged_batch() -> LabelledBatch:
    tokens = Tokens.from_lists([[4, 5, 6, 7], [8, 9]], pad_id=0)
    return LabelledBatch(
        tokens,
        labels=torch.tensor([[1, 0, 2, 0], [2, 0, 0, 0]]),
        supervised=torch.tensor([[True, False, True, False], [True, False, False, False]]),
        rows=torch.arange(2),
    )


@pytest.mark.parametrize("kind", ["token_labels", "tokens"])
def test_token_labels_and_masked_tokens(kind: str) -> None:
    cfg = presets.bert(toys.VOCABULARY, d_model=12, n_heads=3, ffn_width=20, n_layers=1, dropout=0.0)
    if kind == "token_labels":
        cfg = cfg.replace(head=TaggingHead(n_labels=3, bias=True))
    model, batch = build(cfg, seed=0).double(), tagged_batch()
    logits = model(batch.tokens).logits
    expected = F.cross_entropy(logits[batch.supervised], torch.tensor([1, 2, 2]), reduction="sum")
    torch.testing.assert_close(batch_loss(model, batch).loss, expected, rtol=1e-12, atol=0)


def test_a_batch_without_supervision_is_no_zero_by_zero() -> None:
    batch = one_batch()
    empty = dataclasses.replace(batch, supervised=torch.zeros_like(batch.supervised))
    with pytest.raises(SupervisionError, match="0/0"):
        batch_loss(toys.pair_model(), empty)
    assert Work.of(empty).count == 0


def test_real_tokens_are_counted_without_padding() -> None:
    batch = one_batch()
    assert batch.source is not None
    expected = int(batch.decoder_input.lengths().sum() + batch.source.lengths().sum())
    assert Work.of(batch).real_tokens == expected < batch.padded_tokens()


def test_the_routers_loss_is_their_mean() -> None:
    cfg = presets.mixtral(
        toys.VOCABULARY, d_model=12, n_heads=3, n_kv_heads=1, ffn_width=20, n_layers=2, n_experts=3, top_k=2
    )
    cfg = cfg.replace(**{"decoder.layer.feed_forward.load_balance": 0.5})
    model = build(cfg, seed=0).double().train()
    tokens = Tokens.from_lists([[4, 5, 6, 7], [8, 9, 3, 11]], pad_id=0)
    batch = Batch(tokens, tokens.ids.roll(-1, 1), torch.ones(2, 4, dtype=torch.bool), torch.arange(2))
    sums = batch_loss(model, batch)
    routers = [m for m in model.modules() if isinstance(m, Router)]
    assert len(routers) == 2
    model(tokens)
    each = [router.balance(None).item() for router in routers]  # type: ignore[union-attr]
    assert sums.balance.item() == pytest.approx(sum(each) / 2)
    assert sums.balance.requires_grad
    assert batch_loss(model.eval(), batch).balance == 0


def test_padding_is_nothing_that_experts_are_balanced_over() -> None:
    """A batch filled up further has the same loss; both stacks of an encoder–decoder have experts."""
    routed = presets.mixtral(toys.VOCABULARY, d_model=12, n_heads=3, n_kv_heads=1, ffn_width=20, n_layers=1)
    experts = routed.stack.layer.feed_forward.replace(load_balance=0.5)
    model = toys.pair_model(dtype=torch.float64)
    cfg = model.config.replace(**{f"{side}.layer.feed_forward": experts for side in ("encoder", "decoder")})
    model = build(cfg, seed=0).double().train()
    batch = one_batch()
    assert batch.source is not None

    def wider(tokens: Tokens) -> Tokens:
        return Tokens(F.pad(tokens.ids, (0, 3)), F.pad(tokens.real_or_ones(), (0, 3)), layout="right")

    padded = Batch(
        wider(batch.decoder_input),
        F.pad(batch.labels, (0, 3)),
        F.pad(batch.supervised, (0, 3)),
        batch.rows,
        wider(batch.source),
    )
    one, two = batch_loss(model, batch), batch_loss(model, padded)
    torch.testing.assert_close(one.balance, two.balance, rtol=1e-12, atol=0)
    assert one.balance > 0
    copy.deepcopy(model)  # nothing of the pass is held on to


def test_exercise_6_7() -> None:
    """Length 6, prefix 3: positions 1 and 2 see their labels, 3 to 5 do not."""
    supervised = torch.tensor([[True] * 5])
    with pytest.raises(SupervisionError, match=r"\[1, 2\]"):
        check_supervision(supervised, 3)
    supervised[0, :2] = False
    check_supervision(supervised, 3)
    check_supervision(torch.ones(1, 5, dtype=torch.bool), torch.tensor([1]))


def test_supervision_of_padded_prefixes() -> None:
    real = torch.tensor([[False, False, True, True, True, True]])
    supervised = torch.tensor([[False, False, False, True, True, True]])
    with pytest.raises(SupervisionError, match=r"\[2\]"):
        check_supervision(supervised, torch.tensor([3]), real)


def next_tokens(inputs: list[list[int]], labels: list[list[int]]) -> Batch:
    tokens = Tokens.from_lists(inputs, pad_id=0)
    wanted = Tokens.from_lists(labels, pad_id=0)
    return Batch(tokens, wanted.ids, tokens.real_or_ones(), torch.arange(len(inputs)))


def test_exactly_one_shift() -> None:
    target = [[5, 6, 7, 8, 2], [9, 4, 2]]
    once = [[1, 5, 6, 7, 8], [1, 9, 4]]
    twice = [[1, 1, 5, 6, 7], [1, 1, 9]]
    check_shift(next_tokens(once, target))
    with pytest.raises(SupervisionError, match="shift is missing, and the target leaks"):
        check_shift(next_tokens(target, target))
    with pytest.raises(SupervisionError, match="shifted twice"):
        check_shift(next_tokens(twice, target))
    with pytest.raises(SupervisionError, match=r"row 1 \(record 1\): its labels are not the inputs"):
        check_shift(next_tokens(once, [target[0], [4, 9, 2]]))


def test_a_constant_text_is_no_leak() -> None:
    check_shift(next_tokens([[5, 5, 5, 5]], [[5, 5, 5, 5]]))


def test_the_shift_starts_anew_in_every_document() -> None:
    batch = next_tokens([[1, 5, 6, 1, 7]], [[5, 6, 2, 7, 2]])
    with pytest.raises(SupervisionError):
        check_shift(batch)
    documents = torch.tensor([[0, 0, 0, 1, 1]])
    check_shift(
        dataclasses.replace(
            batch, decoder_input=dataclasses.replace(batch.decoder_input, documents=documents)
        )
    )


def test_networks_that_do_not_fit() -> None:
    pair, labelled = one_batch(), next(toys.classes().epoch(0))
    check_fit(toys.pair_model(), pair)
    with pytest.raises(ConfigError, match="asks for sequence_labels"):
        check_fit(toys.pair_model(), labelled)
    bert = build(presets.bert(toys.VOCABULARY, d_model=12, n_heads=3, ffn_width=8, n_layers=1), seed=0)
    with pytest.raises(SupervisionError, match="bidirectional"):
        check_fit(bert, pair)
    check_fit(bert, tagged_batch())
    gpt = build(presets.gpt2(toys.VOCABULARY, d_model=12, n_heads=3, ffn_width=8, n_layers=1), seed=0)
    with pytest.raises(ConfigError, match="the network none"):
        check_fit(gpt, pair)
    with pytest.raises(ConfigError, match="data has no source"):
        check_fit(toys.pair_model(), dataclasses.replace(pair, source=None))
    headless = build(presets.bert(toys.VOCABULARY, d_model=12, n_heads=3, ffn_width=8, n_layers=1, head=None))
    with pytest.raises(ConfigError, match="head is none"):
        check_fit(headless, tagged_batch())
