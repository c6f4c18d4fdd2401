"""The gated width of equal budget (R10, exercise 6.3)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isoform.cost import equal_budget_width
from isoform.errors import ConfigError


def test_the_exercise():
    width = equal_budget_width(4096, 256)
    assert width.exact == pytest.approx(2730.6666666666665, abs=1e-9)
    assert (width.down, width.up) == (2560, 2816)
    assert (width.down_difference, width.up_difference) == (-512, 256)  # times d
    assert (width.down_share, width.up_share) == (-0.0625, 0.03125)
    assert width.nearest == 2816
    assert equal_budget_width(3072).exact == 2048 == equal_budget_width(3072).down


@given(st.integers(1, 10**6), st.integers(1, 4096))
def test_rounding(f: int, multiple: int):
    width = equal_budget_width(f, multiple)
    assert width.down % multiple == width.up % multiple == 0
    assert 3 * width.down <= 2 * f <= 3 * width.up
    assert width.up - width.down == (0 if 2 * f % (3 * multiple) == 0 else multiple)
    assert width.down_difference == 3 * width.down - 2 * f and width.up_difference == 3 * width.up - 2 * f
    assert width.nearest > 0


@pytest.mark.parametrize(("f", "multiple"), [(0, 1), (4, 0)])
def test_refusals(f: int, multiple: int):
    with pytest.raises(ConfigError, match="must be at least 1"):
        equal_budget_width(f, multiple)
