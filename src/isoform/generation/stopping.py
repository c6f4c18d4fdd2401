"""When an output ends, and which ids may be chosen: the third part of generation (Algorithm 6.2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from isoform.errors import ShapeError


class Stopping(Protocol):
    """A rule that says which outputs are complete."""

    def ended(self, new: Int[Tensor, "rows length"]) -> Bool[Tensor, " rows"]:
        """Whether each output is complete with its last token. ``new`` holds the tokens chosen so far,
        without the prompt; the result stays on its device. A row says the same in every batch."""
        ...


@dataclasses.dataclass(frozen=True)
class EndOfSequence:
    """An output is complete when one of the given ids was chosen."""

    ids: tuple[int, ...]

    def ended(self, new: Int[Tensor, "rows length"]) -> Bool[Tensor, " rows"]:
        last = new[:, -1]
        if not self.ids:
            return torch.zeros_like(last, dtype=torch.bool)
        found = last == self.ids[0]
        for other in self.ids[1:]:
            found = found | (last == other)
        return found


@dataclasses.dataclass(frozen=True)
class StopSequences:
    """An output is complete when it ends in one of the given runs of ids, which stay part of it."""

    sequences: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not all(self.sequences):
            raise ShapeError("StopSequences: a stop sequence is empty; every output would end at once")

    def ended(self, new: Int[Tensor, "rows length"]) -> Bool[Tensor, " rows"]:
        found = torch.zeros(new.shape[0], dtype=torch.bool, device=new.device)
        for run in self.sequences:
            if len(run) <= new.shape[1]:
                found |= (new[:, -len(run) :] == torch.tensor(run, device=new.device)).all(-1)
        return found


@dataclasses.dataclass(frozen=True)
class AnyOf:
    """An output is complete when any of several rules says so."""

    rules: tuple[Stopping, ...]

    def ended(self, new: Int[Tensor, "rows length"]) -> Bool[Tensor, " rows"]:
        found = self.rules[0].ended(new)
        for rule in self.rules[1:]:
            found = found | rule.ended(new)
        return found


class Constraints:
    """Ids that may not be chosen, and steps at which only one may.

    Probabilities are not renormalised over what is left; a forced id has log-probability 0, since there
    was nothing to choose. Both as in Hugging Face's logits processors, so that beams rank alike.

    Args:
        suppressed: ids that are never chosen.
        forced: (step, id) pairs, steps counted from 0; stronger than every other constraint.
        eos_ids: ids that end an output …
        min_new_tokens: … and that may not be chosen before so many tokens were.
    """

    def __init__(
        self,
        *,
        suppressed: Sequence[int] = (),
        forced: Sequence[tuple[int, int]] = (),
        eos_ids: Sequence[int] = (),
        min_new_tokens: int = 0,
    ) -> None:
        self._forced = dict(forced)
        self._never = sorted(set(suppressed))
        self._early = sorted({*suppressed, *eos_ids})
        self._min = min_new_tokens if eos_ids else 0
        self._on: dict[tuple[bool, torch.device], Tensor] = {}

    def check(self, vocab: int) -> None:
        """Refuse ids beyond the head's rows.

        Raises:
            ShapeError: an id that the network has no score for, or nothing is left to choose.
        """
        for number in (*self._early, *self._forced.values()):
            if not 0 <= number < vocab:
                raise ShapeError(
                    f"token id {number} is out of range: the network scores ids 0 to {vocab - 1}"
                )
        if len(self._never) == vocab:
            raise ShapeError(f"all {vocab} ids are suppressed: nothing is left to choose")

    def forced_at(self, step: int) -> int | None:
        """The only id that may be chosen at this step."""
        return self._forced.get(step)

    def apply(self, scores: Float[Tensor, "rows vocab"], step: int) -> Float[Tensor, "rows vocab"]:
        """-inf at what may not be chosen; ``scores`` themselves where nothing is forbidden."""
        only = self._forced.get(step)
        if only is not None:
            alone = torch.full_like(scores, -torch.inf)
            alone[:, only] = 0.0
            return alone
        banned = self.banned(step, scores.device)
        return scores if banned is None else scores.index_fill(-1, banned, -torch.inf)

    def banned(self, step: int, device: torch.device) -> Int[Tensor, " ids"] | None:
        """Ids that may not be chosen at a step where none is forced, ascending; None: all may be."""
        early = step < self._min
        ids = self._early if early else self._never
        if not ids:
            return None
        key = early, device
        if key not in self._on:
            self._on[key] = torch.tensor(ids, device=device)
        return self._on[key]
