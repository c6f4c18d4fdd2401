"""Streams with another number of positions inside than their input: a vector in front, pieces, frames."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from isoform.verify.record import Node

OUTER = "as given: "
"""In front of a role's name: its positions as they were given."""

Reals = dict[str, Tensor]


def inner_lengths(
    nodes: Sequence[Node], values: Sequence[Tensor], useful: Collection[int], real: Reals
) -> tuple[Reals, dict[str, int]]:
    """Real positions ``[B, T]`` and lengths by role, those as given beside them where they are others.

    A role's inner length is that of the attentions within one sequence, if these have one that no input has.
    """
    lengths = {role: places.shape[1] for role, places in real.items()}
    softmaxes = (values[n] for n in useful if nodes[n].op in ("_softmax", "_safe_softmax"))
    squares = {v.shape[-1] for v in softmaxes if v.dim() >= 3 and v.shape[-1] == v.shape[-2]}
    unknown = squares - set(lengths.values())
    gone = [role for role, length in lengths.items() if length not in squares]
    if len(unknown) != 1 or len(gone) != 1:
        return real, lengths
    role, length = gone[0], unknown.pop()
    given = real[role]
    places = given.new_ones(len(given), length)
    if length > given.shape[1]:
        places[:, length - given.shape[1] :] = given
    outer = OUTER + role
    return {**real, role: places, outer: given}, {**lengths, role: length, outer: given.shape[1]}


def begin(
    values: Sequence[Tensor], live: Sequence[bool], useful: Collection[int], shape: tuple[int, int]
) -> int | None:
    """The first node that carries content and has these rows and positions."""

    def fits(value: Tensor) -> bool:
        return (
            value.dim() == 3 and value.is_floating_point() and tuple(value.shape[:2]) in (shape, shape[::-1])
        )

    return next((n for n in sorted(useful) if live[n] and fits(values[n])), None)
