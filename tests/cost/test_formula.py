"""Polynomials that print as the chapter writes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isoform.cost.formula import Formula, constant, symbol, total

d, f, B, T, d_q = (symbol(name) for name in ("d", "f", "B", "T", "d_q"))


@pytest.mark.parametrize(
    ("formula", "text"),
    [
        (4 * d * d + 2 * d * f + f + 9 * d, "4d² + 2df + 9d + f"),
        (2 * B * T * d * d, "2BTd²"),
        (2 * d * d_q + 3, "2d·d_q + 3"),
        (d * f - f * d, "0"),
        (f - 2 * d, "-2d + f"),
        (d * d * d * d * d * d * d * d * d * d, "d¹⁰"),
    ],
)
def test_text(formula: Formula, text: str):
    assert str(formula) == text


def test_a_symbol_without_a_size():
    with pytest.raises(KeyError, match="d_q"):
        (d * d_q).value({"d": 3})


formulas = st.recursive(
    st.sampled_from(["d", "f", "T"]).map(symbol) | st.integers(-3, 3).map(constant),
    lambda inner: st.tuples(inner, inner, st.sampled_from("+-*")).map(
        lambda t: t[0] + t[1] if t[2] == "+" else t[0] - t[1] if t[2] == "-" else t[0] * t[1]
    ),
    max_leaves=6,
)


@given(formulas, formulas, st.fixed_dictionaries({n: st.integers(1, 9) for n in "dfT"}))
def test_arithmetic_is_that_of_the_values(left: Formula, right: Formula, sizes: dict[str, int]):
    assert (left + right).value(sizes) == left.value(sizes) + right.value(sizes)
    assert (left - right).value(sizes) == left.value(sizes) - right.value(sizes)
    assert (left * right).value(sizes) == left.value(sizes) * right.value(sizes)
    assert total([left, right]) == left + right
