"""Memory that a training process keeps."""

from __future__ import annotations

import pytest

from isoform.training import heap
from isoform.training.heap import settled_heap


@pytest.mark.parametrize("there", [True, False])
def test_the_allocator_is_asked_and_set_back(monkeypatch, there):
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(heap, "_mallopt", lambda: (lambda *given: asked.append(given)) if there else None)
    with pytest.raises(ValueError, match="inside"), settled_heap():
        assert len(asked) == (2 if there else 0)
        raise ValueError("inside")
    assert len(asked) == (4 if there else 0)
    for (what, large), (same, small) in zip(asked[:2], asked[2:], strict=True):
        assert what == same and small < large


def test_the_allocator_that_is_here_takes_it():
    change = heap._mallopt()
    if change is None:
        pytest.skip("another C library")
    assert change(heap.MAPPED, heap.USUAL) == change(heap.TRIM, 2 * heap.USUAL) == 1
