"""The parts of a search that are made fast: what they choose is what the plain operation chooses."""

from __future__ import annotations

import pytest
import torch

from isoform.generation import Beam, beams, generate
from isoform.generation.beams import _top
from isoform.generation.search import _largest


@pytest.mark.parametrize("vocab", [5, 63, 64, 65, 640, 643, 1000])
@pytest.mark.parametrize("k", [1, 3, 9])
def test_the_largest_of_all_beams(vocab, k):
    generator = torch.Generator().manual_seed(vocab + k)
    scores = torch.randperm(2 * 3 * vocab, generator=generator).view(2, 3, vocab).double()
    running = torch.tensor([[0.0, -vocab / 3, -torch.inf], [-2.5, -torch.inf, -1.25]]).double()
    values, places = _top(scores, running, k)
    flat = (scores + running[..., None]).flatten(1)
    expected = torch.topk(flat, k)
    assert torch.equal(values, expected.values)
    assert torch.equal(places, expected.indices)


def test_places_of_what_cannot_be_chosen_are_places():
    """Fewer candidates than asked for: the rest score -inf, and still lie in the table."""
    scores = torch.full((1, 2, 642), -torch.inf)
    scores[0, 1, 641] = 0.5
    values, places = _top(scores, torch.zeros(1, 2), 4)
    assert values.isfinite().sum() == 1 and int(places[0, 0]) == 642 + 641
    assert int(places.max()) < 2 * 642


def test_beams_in_pieces_are_beams(network, configuration, prompts, monkeypatch):
    model, (tokens, _) = network(configuration()), prompts()
    given = {"max_new_tokens": 8, "search": Beam(3, n_best=3), "eos_id": 4}
    whole = generate(model, tokens, **given)
    monkeypatch.setattr(beams, "PIECE", 1)
    found = generate(model, tokens, **given)
    assert [[h.ids for h in row] for row in found.hypotheses] == [
        [h.ids for h in row] for row in whole.hypotheses
    ]


def test_the_first_of_equal_scores():
    scores = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 1.0], [0.0, torch.nan, 5.0]])
    assert _largest(scores).tolist() == [1, 0, 1]
