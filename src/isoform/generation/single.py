"""One path a draft: greedy search and sampling under way."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from isoform.generation.search import Choice, Hypothesis, Job
from isoform.native import loaded

Pick = Callable[[Tensor, Tensor | None, int], Tensor]
DROP_SHARE = 4  # finished rows are dropped when they are at least one in so many: dropping copies the cache


class Single:
    """Rows are ``drafts`` a sample, in the order of the samples; finished ones leave the batch.

    Args:
        job: what is to be generated.
        drafts: rows a sample.
        pick: ``(scores [R, V], uniforms [R] | None, step) -> tokens [R]``.
        uniforms: ``[N, limit]`` random numbers of every row, on the CPU.
    """

    def __init__(
        self, job: Job, *, drafts: int, pick: Pick, uniforms: Float[Tensor, "rows limit"] | None
    ) -> None:
        self._job = job
        self._drafts = drafts
        self._pick = pick
        self._uniforms = uniforms
        self._step = 0
        self._rows = list(range(job.samples * drafts))  # which output each row of the batch writes
        self._done = [False] * len(self._rows)
        self._found: dict[int, Hypothesis] = {}
        self._ended: Tensor | None = None  # rows done but not yet dropped

    def choose(self, logits: Float[Tensor, "rows vocab"]) -> Choice | None:
        """Pick a token for every row. The list of ended rows is the one thing that comes to the host."""
        first = self._step == 0
        if first:
            self._start(logits)
        repeat: Tensor | None = None
        if first and self._drafts > 1:
            repeat = torch.arange(self._job.samples, device=logits.device).repeat_interleave(self._drafts)
            logits = logits.index_select(0, repeat)
        tokens = self._append(logits)
        step, limit = self._step, self._job.limit
        self._step += 1
        ended = self._job.stopping.ended(self._new[:, : step + 1])
        if self._ended is not None:
            ended = ended | self._ended
        flags: list[bool] = ended.tolist()
        if step + 1 == limit or (any(flags) and all(flags)):
            self._collect(flags, [True] * len(flags))
            return None
        if sum(flags) * DROP_SHARE < len(flags) or not any(flags):
            self._note(flags)
            self._ended = ended if any(flags) else None
            return Choice(tokens, repeat)
        self._collect(flags, flags)
        keep = torch.tensor([i for i, flag in enumerate(flags) if not flag], device=logits.device)
        self._new, self._total = self._new.index_select(0, keep), self._total.index_select(0, keep)
        if self._uniforms is not None:
            self._uniforms = self._uniforms.index_select(0, keep)
        if self._logits is not None:
            self._logits = [kept.index_select(0, keep) for kept in self._logits]
        self._rows = [row for row, flag in zip(self._rows, flags, strict=True) if not flag]
        self._done = [False] * len(self._rows)
        self._ended = None
        return Choice(tokens.index_select(0, keep), keep if repeat is None else repeat.index_select(0, keep))

    def outputs(self) -> list[list[Hypothesis]]:
        """Each sample's drafts, in the order they were drawn in."""
        found = [self._found[i] for i in range(self._job.samples * self._drafts)]
        return [found[i : i + self._drafts] for i in range(0, len(found), self._drafts)]

    def _start(self, logits: Tensor) -> None:
        rows, device = len(self._rows), logits.device
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        self._new = torch.zeros(rows, self._job.limit, dtype=torch.long, device=device)
        self._total = torch.zeros(rows, dtype=wide, device=device)
        self._uniforms = None if self._uniforms is None else self._uniforms.to(device)
        self._logits: list[Tensor] | None = [] if self._job.keep_logits else None

    def _append(self, logits: Tensor) -> Int[Tensor, " rows"]:
        step = self._step
        if self._logits is not None:
            self._logits.append(logits.clone())
        scores = logits.to(self._total.dtype)
        allowed = self._job.constraints.apply(scores, step)
        uniforms = None if self._uniforms is None else self._uniforms[:, step]
        tokens = self._pick(allowed, uniforms, step)
        if self._job.constraints.forced_at(step) is None:
            gained = _log_probabilities(scores, tokens)
            self._total = self._total + (
                gained if self._ended is None else gained.masked_fill(self._ended, 0.0)
            )
        self._new[:, step] = tokens
        return tokens

    def _note(self, flags: list[bool]) -> None:
        """Write down the outputs of rows that ended now and stay in the batch for a while."""
        fresh = [flag and not old for flag, old in zip(flags, self._done, strict=True)]
        if any(fresh):
            self._collect(flags, fresh)
            self._done = flags

    def _collect(self, ended: list[bool], which: list[bool]) -> None:
        """Turn rows into outputs, unless they already were."""
        picked = [i for i, flag in enumerate(which) if flag and not self._done[i]]
        if not picked:
            return
        index = torch.tensor(picked, device=self._new.device)
        ids = self._new[:, : self._step].index_select(0, index).tolist()
        totals = self._total.index_select(0, index).tolist()
        kept = (
            None if self._logits is None else torch.stack([k.index_select(0, index) for k in self._logits], 1)
        )
        for n, (i, row, total) in enumerate(zip(picked, ids, totals, strict=True)):
            if ended[i] and row[-1] in self._job.eos_ids:
                row.pop()
            self._found[self._rows[i]] = Hypothesis(
                row, total, total, ended[i], None if kept is None else kept[n]
            )


def _log_probabilities(
    scores: Float[Tensor, "rows vocab"], tokens: Int[Tensor, " rows"]
) -> Float[Tensor, " rows"]:
    """The log-probability of each row's token."""
    machine = loaded(scores)
    if machine is None:
        # On a CPU the whole log-softmax takes less time than its denominator alone (logsumexp).
        return scores.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    return scores.gather(-1, tokens[:, None])[:, 0] - machine.log_sums(scores)
