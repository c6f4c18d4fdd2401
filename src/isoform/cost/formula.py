"""Polynomials in a configuration's sizes: the printed formula and the number come from one value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Monomial = tuple[str, ...]
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


class Formula:
    """A polynomial with integer coefficients, e.g. ``4d² + 2df + f + 9d`` (6.34).

    Built from `symbol` and integers with ``+``, ``-`` and ``*``; ``str`` prints it, `value` evaluates it.
    """

    __slots__ = ("terms",)

    def __init__(self, terms: Mapping[Monomial, int]) -> None:
        self.terms: dict[Monomial, int] = {m: c for m, c in terms.items() if c}

    def __add__(self, other: Formula | int) -> Formula:
        terms = dict(self.terms)
        for monomial, coefficient in _lift(other).terms.items():
            terms[monomial] = terms.get(monomial, 0) + coefficient
        return Formula(terms)

    def __sub__(self, other: Formula | int) -> Formula:
        return self + -1 * _lift(other)

    def __mul__(self, other: Formula | int) -> Formula:
        terms: dict[Monomial, int] = {}
        for left, a in self.terms.items():
            for right, b in _lift(other).terms.items():
                monomial = tuple(sorted(left + right, key=_rank))
                terms[monomial] = terms.get(monomial, 0) + a * b
        return Formula(terms)

    __radd__ = __add__
    __rmul__ = __mul__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Formula) and self.terms == other.terms

    def __hash__(self) -> int:
        return hash(frozenset(self.terms.items()))

    def value(self, sizes: Mapping[str, int]) -> int:
        """The number for the given sizes, exactly.

        Raises:
            KeyError: a symbol of the formula has no size.
        """
        total = 0
        for monomial, coefficient in self.terms.items():
            product = coefficient
            for name in monomial:
                product *= sizes[name]
            total += product
        return total

    def symbols(self) -> frozenset[str]:
        """The symbols in use."""
        return frozenset(name for monomial in self.terms for name in monomial)

    def __str__(self) -> str:
        if not self.terms:
            return "0"
        ordered = sorted(self.terms.items(), key=lambda item: (-len(item[0]), [_rank(n) for n in item[0]]))
        text = ""
        for monomial, coefficient in ordered:
            sign = ("-" if not text else " - ") if coefficient < 0 else ("" if not text else " + ")
            text += sign + _term(abs(coefficient), monomial)
        return text

    def __repr__(self) -> str:
        return f"Formula({self})"


def symbol(name: str) -> Formula:
    """A size as a formula."""
    return Formula({(name,): 1})


def constant(number: int) -> Formula:
    """A number as a formula."""
    return Formula({(): number})


def total(formulas: Iterable[Formula]) -> Formula:
    """The sum, like terms gathered."""
    result = constant(0)
    for formula in formulas:
        result = result + formula
    return result


def _lift(value: Formula | int) -> Formula:
    return constant(value) if isinstance(value, int) else value


# Reading order inside a product: how many, then how long, then how wide, as the chapter writes BTd² and 2df.
_ORDER = [
    "B", "T", "S", "K", "A", "E", "k", "V", "P", "N", "R", "h", "d", "d_q", "d_kv", "d_h", "w", "f", "L",
]  # fmt: skip


def _rank(name: str) -> tuple[int, str]:
    return (_ORDER.index(name) if name in _ORDER else len(_ORDER), name)


def _term(coefficient: int, monomial: Monomial) -> str:
    factors = [
        name + (str(power).translate(_SUPERSCRIPTS) if (power := monomial.count(name)) > 1 else "")
        for name in dict.fromkeys(monomial)
    ]
    # "2df" reads as a product; with subscripts it wouldn't.
    product = ("·" if any("_" in name for name in monomial) else "").join(factors)
    if not product:
        return str(coefficient)
    return product if coefficient == 1 else f"{coefficient}{product}"
