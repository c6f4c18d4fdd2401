"""What a comparison says: two models side by side, row by row in the order of the dataflow (R39, R40)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Row:
    """One activation (or gradient) of both models.

    Args:
        name: what it is.
        layer: its layer, None outside of layers.
        reference, candidate: module paths.
        error: largest difference, relative to the largest value of the reference.
        expected: the difference that rounding explains at this point.
        shape: as compared, batch and time first.
    """

    name: str
    layer: int | None
    reference: str
    candidate: str
    error: float
    expected: float
    shape: tuple[int, ...]

    @property
    def differs(self) -> bool:
        """More than rounding."""
        return not self.error <= self.expected


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two models side by side.

    Args:
        reference, candidate: their classes.
        verdict: "equivalent"; "noise": more than a few units in the last place, but no more than rounding
            explains; "differs".
        rows: aligned activations in order of the dataflow, gradients after them.
        profiles: of the first divergence: error by ``position``, ``row``, ``channel``, ``head``.
        notes: what has no counterpart.
    """

    reference: str
    candidate: str
    verdict: Literal["equivalent", "noise", "differs"]
    rows: tuple[Row, ...]
    profiles: dict[str, list[float]]
    notes: tuple[str, ...] = ()

    @property
    def first_divergence(self) -> Row | None:
        """The first row that rounding does not explain."""
        return next((row for row in self.rows if row.differs), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data with stable keys."""
        rows = [{**dataclasses.asdict(row), "differs": row.differs} for row in self.rows]
        first = self.first_divergence
        return {
            **dataclasses.asdict(self),
            "rows": rows,
            "first_divergence": None if first is None else dataclasses.asdict(first),
        }

    def __str__(self) -> str:
        lines = [f"{self.reference} and {self.candidate}: {self.verdict}"]
        for row in self.rows:
            mark = "≠" if row.differs else " "
            layer = "" if row.layer is None else f"layer {row.layer} "
            lines.append(f"{mark} {row.error:9.2e}  (rounding {row.expected:.0e})  {layer}{row.name}")
        return "\n".join([*lines, *(f"note: {n}" for n in self.notes)])

    def _repr_html_(self) -> str:
        from html import escape

        body = "".join(
            f"<tr><td>{'≠' if r.differs else ''}</td><td>{'' if r.layer is None else r.layer}</td>"
            f"<td>{escape(r.name)}</td><td>{r.error:.2e}</td><td>{r.expected:.0e}</td></tr>"
            for r in self.rows
        )
        caption = escape(f"{self.reference} and {self.candidate}: {self.verdict}")
        return f"<table><caption>{caption}</caption>{body}</table>"
