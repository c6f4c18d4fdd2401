"""Memory that a training process keeps."""

from __future__ import annotations

import gc

import pytest

from isoform.training import heap
from isoform.training.heap import settled_heap


def test_what_was_there_before_is_not_collected_and_comes_back():
    before = gc.get_freeze_count()
    with pytest.raises(ValueError, match="inside"), settled_heap():
        assert gc.get_freeze_count() > before + 1000
        raise ValueError("inside")
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("there", [True, False])
def test_the_allocator_is_asked_and_set_back(monkeypatch, there):
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(heap, "_mallopt", lambda: (lambda *given: asked.append(given)) if there else None)
    with settled_heap():
        inside = len(asked)
    assert (inside, len(asked)) == ((2, 4) if there else (0, 0))
    assert all(small < large for (_, large), (_, small) in zip(asked[:2], asked[2:], strict=True))
