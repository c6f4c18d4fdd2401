"""Beam search under way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from isoform.generation.candidates import Scores
from isoform.generation.search import Choice, Hypothesis, Job
from isoform.generation.single import DROP_SHARE

if TYPE_CHECKING:
    from isoform.generation.search import Beam


@dataclasses.dataclass(frozen=True, eq=False)
class Complete:
    """The best complete outputs of every sample so far, best first; empty places score -inf."""

    ids: Int[Tensor, "samples width limit"]
    trail: Int[Tensor, "samples width limit"] | None
    score: Float[Tensor, "samples width"]
    total: Float[Tensor, "samples width"]
    length: Int[Tensor, "samples width"]
    ended: Bool[Tensor, "samples width"]

    @classmethod
    def empty(cls, samples: int, width: int, limit: int, like: Tensor, trail: bool) -> Complete:
        """Nothing is complete yet."""
        ids = torch.zeros(samples, width, limit, dtype=torch.long, device=like.device)
        low = torch.full((samples, width), -torch.inf, dtype=like.dtype, device=like.device)
        return cls(ids, ids if trail else None, low, low, ids[..., 0], ids[..., 0].bool())

    def merge(self, other: Complete) -> Complete:
        """The best of both; at equal scores the earlier one."""
        score = torch.cat([self.score, other.score], 1)
        best = score.sort(dim=-1, descending=True, stable=True).indices[:, : self.score.shape[1]]
        return self._map(lambda mine, new: _pick(torch.cat([mine, new], 1), best), other)

    def select(self, samples: Tensor) -> Complete:
        """Some of the samples."""
        return self._map(lambda mine, _: mine.index_select(0, samples), self)

    def _map(self, change: Callable[[Tensor, Tensor], Tensor], other: Complete) -> Complete:
        return Complete(
            ids=change(self.ids, other.ids),
            trail=None if self.trail is None or other.trail is None else change(self.trail, other.trail),
            score=change(self.score, other.score),
            total=change(self.total, other.total),
            length=change(self.length, other.length),
            ended=change(self.ended, other.ended),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """The candidates of one step, best first, and the beams that go on."""

    total: Float[Tensor, "samples candidates"]
    ids: Int[Tensor, "samples candidates limit"]
    trail: Int[Tensor, "samples candidates limit"] | None
    ended: Bool[Tensor, "samples candidates"]
    complete: Bool[Tensor, "samples candidates"]
    on: Int[Tensor, "samples width"]
    running: Float[Tensor, "samples width"]
    parent: Int[Tensor, "samples width"]
    token: Int[Tensor, "samples width"]


class Beams:
    """Rows are ``width`` a sample, in the order of the samples; samples that are done leave the batch."""

    def __init__(self, job: Job, settings: Beam) -> None:
        self._job = job
        self._beam = settings
        self._step = 0
        self._samples = list(range(job.samples))  # which samples are still in the batch
        self._done = [False] * job.samples
        self._found: dict[int, list[Hypothesis]] = {}
        # At least `width` candidates go on, even if every beam's best ones all end an output.
        self._candidates = max(2, 1 + len(job.eos_ids)) * settings.width
        self._logits: list[Tensor] = []

    def choose(self, logits: Float[Tensor, "rows vocab"]) -> Choice | None:
        """Extend every beam by one token.

        Whether scores tie, outputs are complete, samples done and beams moved comes to the host in one
        piece; only where scores tie and are not in order, or an output is complete, does it ask again.
        """
        if self._step == 0:
            self._start(logits)
        if self._job.keep_logits:
            self._logits.append(logits.clone())
        scores = Scores(logits, self._running, self._rows_a_sample, self._job.constraints, self._step)
        k = min(self._candidates, scores.places)
        values, places = scores.best(k + 1)
        ties = (values[:, 1:] == values[:, :-1]) & values[:, 1:].isfinite()
        step = self._extend(values[:, :k], places[:, :k], logits.shape[-1])
        tied, completed, moved, *open_ = self._ask(step, ties)
        if tied and not scores.ordered:
            step = self._extend(*scores.in_order(k), logits.shape[-1])
            _, completed, moved, *open_ = self._ask(step, ties)
        self._step += 1
        if completed:
            self._keep(step)
            open_ = self._still_open(step.running).tolist()
        self._open = self._still_open(step.running)
        self._ids, self._running = _pick(step.ids, step.on), step.running
        self._trail = None if step.trail is None else _pick(step.trail, step.on)
        if self._step == self._job.limit or not any(open_):
            self._collect([True] * len(open_))
            return None
        return self._next(step.parent, step.token, [not o for o in open_], moved)

    def outputs(self) -> list[list[Hypothesis]]:
        """The best ``n_best`` outputs of each sample."""
        return [self._found[i] for i in range(self._job.samples)]

    def _start(self, logits: Tensor) -> None:
        samples, width, limit = self._job.samples, self._beam.width, self._job.limit
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        self._running = torch.full((samples, width), -torch.inf, dtype=wide, device=logits.device)
        self._running[:, 0] = 0.0  # the beams of a sample are all the same yet: only one of them counts
        self._ids = torch.zeros(samples, width, limit, dtype=torch.long, device=logits.device)
        self._trail = torch.zeros_like(self._ids) if self._job.keep_logits else None
        self._best = Complete.empty(samples, width, limit, self._running, self._job.keep_logits)
        self._open = torch.ones(samples, dtype=torch.bool, device=logits.device)
        self._rows_a_sample = 1

    def _extend(self, total: Tensor, place: Tensor, vocab: int) -> Step:
        """The histories of the candidates, and which of them go on."""
        samples, width = self._running.shape
        step, last = self._step, self._step + 1 == self._job.limit
        parent, token = place // vocab, place % vocab
        ids = _extended(self._ids, parent, token, step)
        trail = self._trail
        if trail is not None:
            rows = self._rows_a_sample
            origin = torch.arange(samples, device=place.device)[:, None] * rows + parent.clamp(max=rows - 1)
            trail = _extended(trail, parent, origin, step)
        ended = self._job.stopping.ended(ids[..., : step + 1].flatten(0, 1)).view(samples, -1)
        complete = torch.ones_like(ended) if last else ended
        # The candidates are in order, so the first that go on are the best that do.
        on = complete.to(torch.uint8).sort(dim=-1, stable=True).indices[:, :width]
        running = total.masked_fill(complete, -torch.inf).gather(-1, on)
        return Step(
            total, ids, trail, ended, complete, on, running, parent.gather(-1, on), token.gather(-1, on)
        )

    def _ask(self, step: Step, ties: Tensor) -> list[bool]:
        """Tied, completed, moved, and for each sample whether it is still open: one transfer."""
        home = torch.arange(step.parent.shape[1], device=step.parent.device)
        answers = [ties.any(), step.complete[:, : self._beam.width].any(), (step.parent != home).any()]
        return torch.cat([torch.stack(answers), self._still_open(step.running, self._step + 1)]).tolist()

    def _still_open(self, running: Tensor, length: int | None = None) -> Bool[Tensor, " samples"]:
        """Whether a sample may yet get a better output than the worst it has; once closed, it stays so."""
        beam = self._beam
        grows = beam.early_stopping == "never" and beam.alpha > 0
        length = self._step if length is None else length
        worst = self._best.score[:, -1]
        better = running[:, 0] / beam.penalty(self._job.limit if grows else length) > worst
        if beam.early_stopping == "when_full":
            better = better & worst.isneginf()
        return self._open & better

    def _keep(self, step: Step) -> None:
        """Enter complete candidates among the best; only the first ``width`` candidates may be.

        What comes in after a sample was closed does not matter: its outputs were taken then.
        """
        width = self._beam.width
        total = step.total[:, :width]
        score = total / self._beam.penalty(self._step)
        score = score.masked_fill(~step.complete[:, :width], -torch.inf)
        trail = None if step.trail is None else step.trail[:, :width]
        length = torch.full_like(step.on, self._step)
        new = Complete(step.ids[:, :width], trail, score, total, length, step.ended[:, :width])
        self._best = self._best.merge(new)

    def _next(self, parent: Tensor, token: Tensor, done: list[bool], moved: bool) -> Choice:
        """Feed the beams that go on; drop samples that are done, a few at a time."""
        width, before = self._beam.width, self._rows_a_sample
        self._rows_a_sample = width
        start = torch.arange(len(done), device=token.device)[:, None] * before
        rows = start + parent.clamp(max=before - 1)
        self._collect(done)
        if sum(done) * DROP_SHARE < len(done) or not any(done):
            same = before == width
            return Choice(token.flatten(), rows.flatten() if moved or not same else None, same)
        keep = torch.tensor([i for i, d in enumerate(done) if not d], device=token.device)
        self._ids, self._running = self._ids.index_select(0, keep), self._running.index_select(0, keep)
        self._trail = None if self._trail is None else self._trail.index_select(0, keep)
        self._best, self._open = self._best.select(keep), self._open.index_select(0, keep)
        self._samples = [s for s, d in zip(self._samples, done, strict=True) if not d]
        self._done = [False] * len(self._samples)
        return Choice(token.index_select(0, keep).flatten(), rows.index_select(0, keep).flatten())

    def _collect(self, which: list[bool]) -> None:
        """Turn the complete outputs of samples into hypotheses, unless that was done before."""
        best = self._best
        for i, flag in enumerate(which):
            if not flag or self._done[i]:
                continue
            self._done[i] = True
            rows = zip(
                best.ids[i].tolist(),
                best.score[i].tolist(),
                best.total[i].tolist(),
                best.length[i].tolist(),
                best.ended[i].tolist(),
                strict=True,
            )
            self._found[self._samples[i]] = [
                self._hypothesis(i, n, ids[:length], total, score, ended)
                for n, (ids, score, total, length, ended) in enumerate(rows)
                if score != -float("inf") and n < self._beam.n_best
            ]

    def _hypothesis(
        self, sample: int, place: int, ids: list[int], total: float, score: float, ended: bool
    ) -> Hypothesis:
        logits = None
        if self._best.trail is not None:
            trail = self._best.trail[sample, place, : len(ids)].tolist()
            logits = torch.stack([self._logits[step][row] for step, row in enumerate(trail)])
        if ended and ids[-1] in self._job.eos_ids:
            ids.pop()
        return Hypothesis(ids, total, score, ended, logits)


def _pick(values: Tensor, places: Int[Tensor, "samples width"]) -> Tensor:
    """``values[i, places[i]]`` for every sample i."""
    if values.dim() == 2:
        return values.gather(1, places)
    return values.gather(1, places[..., None].expand(-1, -1, values.shape[-1]))


def _extended(ids: Tensor, parent: Tensor, token: Tensor, step: int) -> Tensor:
    """The beams' histories with one more token each."""
    grown = _pick(ids, parent)
    grown[..., step] = token
    return grown
