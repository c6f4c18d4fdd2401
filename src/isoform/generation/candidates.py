"""The best continuations of beams, without the log-probabilities of all others where that is faster."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from isoform.generation.stopping import Constraints
from isoform.native import loaded

PIECE = 64
"""Elements whose maximum is looked at before they are."""


class Scores:
    """What every token after every beam would bring the sum of log-probabilities to.

    Args:
        logits: of the rows that were read, before constraints.
        running: sums so far.
        rows_a_sample: how many rows a sample has; one where only its first beam counts yet.
        constraints: on what may be chosen.
        step: tokens chosen so far.
    """

    def __init__(
        self,
        logits: Float[Tensor, "rows vocab"],
        running: Float[Tensor, "samples width"],
        rows_a_sample: int,
        constraints: Constraints,
        step: int,
    ) -> None:
        self._logits, self._running, self._rows = logits.to(running.dtype), running, rows_a_sample
        self._constraints, self._step = constraints, step
        self._machine = loaded(self._logits) if constraints.forced_at(step) is None else None

    @property
    def places(self) -> int:
        """How many continuations a sample has."""
        return self._running.shape[1] * self._logits.shape[1]

    def best(self, k: int) -> tuple[Float[Tensor, "samples k"], Int[Tensor, "samples k"]]:
        """The k largest, or all, and their places in a row of all beams; equal ones in any order."""
        machine = self._machine
        if machine is None:
            return largest(self._all(), self._running, k)
        vocab, rows = self._logits.shape[1], self._rows
        banned = self._constraints.banned(self._step, self._logits.device)
        running = self._running[:, :rows]
        values, ids = machine.best(self._logits, min(k, vocab), banned, running.flatten())
        samples = len(running)
        first = torch.arange(rows, device=ids.device)[:, None] * vocab
        places = (ids.view(samples, rows, -1) + first).flatten(1)
        totals = values.view(samples, -1)
        if (short := min(k, self.places) - totals.shape[1]) > 0:  # of beams that do not count yet
            totals, places = F.pad(totals, (0, short), value=-torch.inf), F.pad(places, (0, short))
        # Places ascend where totals are equal, within a beam and from one to the next.
        inner = totals.sort(dim=-1, descending=True, stable=True)
        return inner.values[:, :k], places.gather(1, inner.indices[:, :k])

    @property
    def ordered(self) -> bool:
        """Whether equal ones are in order all the same."""
        return self._machine is not None

    def in_order(self, k: int) -> tuple[Float[Tensor, "samples k"], Int[Tensor, "samples k"]]:
        """The k best, equal ones in the order of their place: what `best` leaves open."""
        scores = self._all()
        least = largest(scores, self._running, k)[0][:, -1:]
        flat = (scores + self._running[..., None]).flatten(1)
        # Only what is no less than the k-th is put in order: a row has thousands.
        sample, place = (~(flat < least)).nonzero().unbind(1)
        count = sample.bincount(minlength=len(flat))
        column = torch.arange(len(sample), device=sample.device) - (count.cumsum(0) - count)[sample]
        total = flat.new_full((len(flat), int(count.max())), -torch.inf)
        places = torch.zeros_like(total, dtype=torch.long)
        total[sample, column], places[sample, column] = flat[sample, place], place
        best = total.sort(dim=-1, descending=True, stable=True)
        return best.values[:, :k], places.gather(1, best.indices[:, :k])

    def _all(self) -> Float[Tensor, "samples width vocab"]:
        """Log-probability of every token after every beam."""
        samples, width = self._running.shape
        log_probs = self._constraints.apply(torch.log_softmax(self._logits, -1), self._step)
        return log_probs.view(samples, self._rows, -1).expand(samples, width, -1)


def largest(
    scores: Float[Tensor, "samples width vocab"], running: Float[Tensor, "samples width"], k: int
) -> tuple[Float[Tensor, "samples k"], Int[Tensor, "samples k"]]:
    """The k largest of ``scores + running``, or all, and their places in a row of all beams.

    On a CPU `torch.topk` takes longer than the network's head. The largest elements lie in the pieces with
    the largest maxima, and only these are searched.
    """
    samples, width, vocab = scores.shape
    pieces = vocab // PIECE
    if scores.device.type != "cpu" or width * pieces < 4 * k:
        flat = (scores + running[..., None]).flatten(1)
        best = torch.topk(flat, min(k, flat.shape[1]))
        return best.values, best.indices
    whole = scores[..., : pieces * PIECE].unflatten(-1, (pieces, PIECE)).amax(-1)
    if pieces * PIECE < vocab:
        whole = torch.cat([whole, scores[..., pieces * PIECE :].amax(-1, keepdim=True)], -1)
    best = torch.topk((whole + running[..., None]).flatten(1), k).indices
    beam, piece = best // whole.shape[-1], best % whole.shape[-1]
    column = piece[..., None] * PIECE + torch.arange(PIECE, device=best.device)
    beyond = column >= vocab
    beam, column = beam[..., None].expand_as(column), column.clamp(max=vocab - 1)
    rows = torch.arange(samples, device=best.device)[:, None, None]
    found = scores[rows, beam, column] + running[rows, beam]
    inner = torch.topk(found.masked_fill(beyond, -torch.inf).flatten(1), k)
    return inner.values, (beam * vocab + column).flatten(1).gather(1, inner.indices)
