"""Algorithms 6.1 and 6.2 (R30, R31, R34) written out in loops, a sample at a time, against the library."""

from __future__ import annotations

import pytest
import torch

import isoform as iso
from isoform.data.batching import Batch, shift_right
from isoform.errors import SupervisionError
from isoform.training.loss import batch_loss
from networks import VOCAB, network, preset
from tolerances import close

PAD, BOS, EOS = 0, 1, 2
SOURCES = [[5, 9, 7, EOS], [8, EOS], [4, 4, 6, 10, 3, EOS]]
TARGETS = [[11, 3, EOS], [7, 5, 12, 9, EOS], [6, EOS]]


@pytest.fixture(scope="module")
def model():
    return network(preset("original"))


def padded(rows, side="right"):
    return iso.Tokens.from_lists(rows, pad_id=PAD, side=side)


def batch(sources, targets):
    """Steps 1 and 4 of Algorithm 6.1: padding masks, and the target shifted right by one behind its start."""
    tokens = padded(targets)
    inputs, labels = shift_right(tokens.ids, BOS)
    real = tokens.real_or_ones()
    return Batch(iso.Tokens(inputs, real), labels, real, torch.arange(len(targets)), padded(sources))


# --- Algorithm 6.1 ----------------------------------------------------------------------------------------


def by_hand(model, eta):
    """Sums of both losses and their number: sample by sample, position by position."""
    smoothed, nll, count = torch.zeros((), dtype=torch.float64), 0.0, 0
    for source, target in zip(SOURCES, TARGETS, strict=True):
        memory = model.encode(iso.Tokens(torch.tensor([source])))
        for t, label in enumerate(target):
            prefix = iso.Tokens(torch.tensor([[BOS, *target[:t]]]))  # nothing of what is to come is there
            scores = model.head(model.hidden(prefix, memory=memory))[0, -1]
            log = scores - scores.exp().sum().log()
            smoothed = smoothed - ((1 - eta) * log[label] + eta * log.mean())
            nll -= float(log[label].detach())
            count += 1
    return smoothed, nll, count


@pytest.mark.parametrize("eta", [0.0, 0.1])
def test_training_loss_and_gradients(model, eta):
    """One pass over a padded batch is the loop above, smoothing (R34) and gradients included."""
    expected, nll, count = by_hand(model, eta)
    found = batch_loss(model, batch(SOURCES, TARGETS), smoothing=eta)
    assert found.count == count == sum(map(len, TARGETS))
    assert close(found.loss, expected)
    assert close(found.nll, torch.tensor(nll, dtype=torch.float64))
    parameters = list(model.parameters())
    mine = torch.autograd.grad(found.loss / found.count, parameters)
    theirs = torch.autograd.grad(expected / count, parameters)
    assert all(close(a, b) for a, b in zip(mine, theirs, strict=True))


def test_micro_batches_are_divided_by_their_common_number(model):
    """Not a mean of means: pieces of one and of seven positions weigh by their positions."""
    whole = batch_loss(model, batch(SOURCES, TARGETS))
    pieces = [batch_loss(model, batch(SOURCES[i : i + 1], TARGETS[i : i + 1])) for i in range(3)]
    total = sum(p.count for p in pieces)
    assert close(sum(p.loss for p in pieces) / total, whole.loss / whole.count)
    means = sum(p.loss / p.count for p in pieces) / 3
    assert abs(float((means - whole.loss / whole.count).detach())) > 1e-3


def test_only_supervised_positions_count(model):
    full = batch(SOURCES, TARGETS)
    some = full.supervised.clone()
    some[1, 1:3] = False
    found = batch_loss(model, Batch(full.decoder_input, full.labels, some, full.rows, full.source))
    with torch.no_grad():
        logits = model(full.decoder_input, source=full.source).logits
    expected = -logits.log_softmax(-1).gather(-1, full.labels[..., None])[..., 0][some].sum()
    assert found.count == int(some.sum())
    assert close(found.loss, expected)


def test_no_supervised_position_is_no_loss(model):
    full = batch(SOURCES, TARGETS)
    none = torch.zeros_like(full.supervised)
    with pytest.raises(SupervisionError, match="no supervised position"):
        batch_loss(model, Batch(full.decoder_input, full.labels, none, full.rows, full.source))


def test_the_shift_is_the_only_one():
    """(A, B, EOS) is read as (BOS, A, B) and predicted as it is; the loss shifts nothing further."""
    inputs, labels = shift_right(torch.tensor([[11, 3, EOS]]), BOS)
    assert inputs.tolist() == [[BOS, 11, 3]]
    assert labels.tolist() == [[11, 3, EOS]]


# --- Algorithm 6.2 ----------------------------------------------------------------------------------------


def greedy_by_hand(model, source, limit, eos):
    """One sample: encode once, run the whole prefix, take the best, stop at EOS or the limit."""
    with torch.no_grad():
        memory = model.encode(iso.Tokens(torch.tensor([source])))
        written = [BOS]
        for _ in range(limit):
            scores = model.head(model.hidden(iso.Tokens(torch.tensor([written])), memory=memory))[0, -1]
            written.append(int(scores.argmax()))
            if written[-1] == eos:
                return written[1:-1], True
    return written[1:], False


@pytest.mark.parametrize("side", ["right", "left"])
def test_greedy_generation(model, side):
    """A batch is its samples one by one; one of them ends early by construction of what EOS is."""
    limit = 9
    free = greedy_by_hand(model, SOURCES[1], limit, eos=-1)[0]
    eos = free[3]
    expected = [greedy_by_hand(model, source, limit, eos) for source in SOURCES]
    found = iso.generate(
        model, padded([[BOS]] * 3), source=padded(SOURCES, side), max_new_tokens=limit, eos_id=eos
    )
    assert found.ids == [ids for ids, _ in expected]
    assert found.finished == [ended for _, ended in expected]
    assert expected[1][1]
    assert all(eos not in ids for ids in found.ids)


def test_choice_and_stopping_are_apart_from_the_forward_pass(model):
    """Any function from tokens to scores can be searched: here the network with its scores turned round."""
    with torch.no_grad():
        bias = torch.zeros(VOCAB, dtype=torch.float64)
        bias[6] = 1e6
        with iso.capture(model, replace={"head.logits": lambda scores: scores + bias}):
            found = iso.generate(
                model, padded([[BOS]] * 3), source=padded(SOURCES), max_new_tokens=4, eos_id=EOS
            )
    assert found.ids == [[6] * 4] * 3
    assert found.finished == [False] * 3


def test_evaluation_mode_while_generating():
    dropping = network(preset("original", dropout=0.5)).train()
    runs = [
        iso.generate(dropping, padded([[BOS]] * 3), source=padded(SOURCES), max_new_tokens=5).ids
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert dropping.training
