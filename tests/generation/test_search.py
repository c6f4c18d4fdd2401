"""The parts of a search that are made fast: what they choose is what the plain operation chooses."""

from __future__ import annotations

import pytest
import torch

from isoform.generation import Beam, candidates, generate
from isoform.generation.candidates import Scores, largest
from isoform.generation.search import _largest
from isoform.generation.stopping import Constraints
from isoform.native import library


@pytest.mark.parametrize("vocab", [5, 63, 64, 65, 640, 643, 1000])
@pytest.mark.parametrize("k", [1, 3, 9])
def test_the_largest_of_all_beams(vocab, k):
    generator = torch.Generator().manual_seed(vocab + k)
    scores = torch.randperm(2 * 3 * vocab, generator=generator).view(2, 3, vocab).double()
    running = torch.tensor([[0.0, -vocab / 3, -torch.inf], [-2.5, -torch.inf, -1.25]]).double()
    values, places = largest(scores, running, k)
    flat = (scores + running[..., None]).flatten(1)
    expected = torch.topk(flat, k)
    assert torch.equal(values, expected.values)
    assert torch.equal(places, expected.indices)


def test_places_of_what_cannot_be_chosen_are_places():
    """Fewer candidates than asked for: the rest score -inf, and still lie in the table."""
    scores = torch.full((1, 2, 642), -torch.inf)
    scores[0, 1, 641] = 0.5
    values, places = largest(scores, torch.zeros(1, 2), 4)
    assert values.isfinite().sum() == 1 and int(places[0, 0]) == 642 + 641
    assert int(places.max()) < 2 * 642


def test_beams_in_pieces_are_beams(network, configuration, prompts, monkeypatch):
    model, (tokens, _) = network(configuration()), prompts()
    given = {"max_new_tokens": 8, "search": Beam(3, n_best=3), "eos_id": 4}
    whole = generate(model, tokens, **given)
    monkeypatch.setattr(candidates, "PIECE", 1)
    found = generate(model, tokens, **given)
    assert [[h.ids for h in row] for row in found.hypotheses] == [
        [h.ids for h in row] for row in whole.hypotheses
    ]


def test_the_first_of_equal_scores():
    scores = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 1.0], [0.0, torch.nan, 5.0]])
    assert _largest(scores).tolist() == [1, 0, 1]


@pytest.mark.skipif(library(torch.float64) is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("vocab", [5, 64, 130, 643])
@pytest.mark.parametrize("rows_a_sample", [1, 3])
@pytest.mark.parametrize("step", [0, 1, 2])
def test_the_best_continuations(vocab, rows_a_sample, step, monkeypatch):
    """By machine code and without it: banned ends, a forced id, beams that do not count, and an id that is
    suppressed although it scores best."""
    generator = torch.Generator().manual_seed(vocab)
    rows = 2 * rows_a_sample
    logits = torch.randperm(rows * vocab, generator=generator).view(rows, vocab).double() / vocab
    running = torch.tensor([[0.0, -1.5, -torch.inf], [-2.5, -torch.inf, -1.25]]).double()
    running[:, rows_a_sample:] = -torch.inf
    given = Constraints(suppressed=[int(logits[0].argmax())], forced=[(2, 3)], eos_ids=[4], min_new_tokens=1)
    found = []
    for machine in (None, library(torch.float64)):
        monkeypatch.setattr(candidates, "loaded", lambda x, machine=machine: machine)
        found.append(Scores(logits, running, rows_a_sample, given, step).best(7))
    (values, places), (others, their_places) = found
    torch.testing.assert_close(values, others, rtol=0, atol=1e-12)
    count = values.isfinite()
    assert count.any() and torch.equal(places[count], their_places[count])
    assert int(their_places.max()) < 3 * vocab


@pytest.mark.skipif(library(torch.float32) is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("k", [1, 6, 40])
def test_equal_totals_are_in_the_order_of_their_place(k, monkeypatch):
    """Within a beam, over beams, and of log-probabilities that only the beam's own sum makes equal."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randint(0, 3, (6, 200), generator=generator).float()
    logits[3:] += torch.rand(3, 200, generator=generator) * 1e-6
    running = torch.tensor([[-2.0, -2.0, -1.0], [-9000.0, -9000.0, -9000.0]])
    given = Constraints(suppressed=[7], forced=[], eos_ids=[], min_new_tokens=0)
    found = []
    for machine in (None, library(torch.float32)):
        monkeypatch.setattr(candidates, "loaded", lambda x, machine=machine: machine)
        scores = Scores(logits, running, 3, given, 0)
        assert scores.ordered == (machine is not None)
        found.append(scores.best(k) if scores.ordered else scores.in_order(k))
    log_probs = logits.log_softmax(1).view(2, 3, 200).index_fill(2, torch.tensor([7]), -torch.inf)
    expected = (log_probs + running[..., None]).flatten(1).sort(dim=-1, descending=True, stable=True)
    for values, places in found:
        torch.testing.assert_close(values, expected.values[:, :k])
        assert torch.equal(places, expected.indices[:, :k])


@pytest.mark.skipif(library(torch.float32) is None, reason="there is no C++ compiler")
def test_the_first_of_equal_scores_come_first():
    scores = torch.tensor([[1.0, 3.0, 3.0, 3.0, -torch.inf], [2.0, 2.0, 1.0, 2.0, 2.0]])
    values, ids = library(torch.float32).best(scores, 3, torch.tensor([2]), torch.tensor([-1.0, 0.0]))
    assert ids.tolist() == [[1, 3, 0], [0, 1, 3]]
    torch.testing.assert_close(values, scores.log_softmax(1).gather(1, ids) + torch.tensor([[-1.0], [0.0]]))


@pytest.mark.skipif(library(torch.float32) is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_scores_that_are_no_numbers_stay_so(odd):
    scores = torch.tensor([[1.0, odd, 3.0], [2.0, 5.0, 1.0]])
    values, ids = library(torch.float32).best(scores, 2, None, torch.zeros(2))
    assert values[0].isnan().all() and values[1].isfinite().all() and int(ids.max()) <= 2
