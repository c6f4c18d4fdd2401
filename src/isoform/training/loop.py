"""The training loop (Algorithm 6.1): an update after the other, until something ends the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from isoform.nn import Transformer
from isoform.nn.exact import exact_products
from isoform.training.assembly import Assembly
from isoform.training.heap import settled_heap
from isoform.training.interrupt import Interrupt
from isoform.training.loss import Work
from isoform.training.noise import NoiseScale
from isoform.training.optimizer import set_rate, update
from isoform.training.parallel import whole
from isoform.training.record import Record
from isoform.training.result import FitResult, Stop
from isoform.training.schedule import rate
from isoform.training.settings import Training
from isoform.training.trial import Trial
from isoform.training.updates import AnyBatches, Update, Updates


def run_loop(
    model: Transformer,
    train: AnyBatches,
    validation: AnyBatches | None,
    settings: Training,
    folder: Path,
    *,
    where: Callable[[int], str],
    quiet: bool,
    trial: Trial | None = None,
) -> FitResult:
    """Train in a folder that the caller holds; see `isoform.training.fit`. With a trial made before, none is
    made here."""
    run = Assembly(model, train, validation, settings, folder, trial)
    try:
        return _Loop(run, where, quiet).run()
    finally:
        run.release()


class _Loop:
    """Makes the updates; what they come to is the record's.

    Args:
        parts: the parts of the run.
        where: names the sample of a row, for messages.
        quiet: no bar and no remarks.
    """

    def __init__(self, parts: Assembly, where: Callable[[int], str], quiet: bool) -> None:
        self.parts, self.settings = parts, parts.settings
        self.state, remarks = parts.begin()
        self.record = Record(parts, self.state, remarks, where, quiet=quiet)
        self.noise = NoiseScale(parts.parameters) if self.settings.gradient_noise else None
        self._fill: Work | None = None

    def run(self) -> FitResult:
        """Train until something ends it."""
        parts, record = self.parts, self.record
        try:
            with Interrupt() as interrupt, exact_products(parts.device), settled_heap():
                parts.model.train()
                updates = Updates(
                    parts.train, self.settings.accumulation, parts.device, self.state, parts.group
                )
                with closing(iter(updates)) as found:
                    stop = self._steps(found, interrupt)
                record.stopped(stop)
            return record.result(stop, interrupt.signal)
        finally:
            record.close()

    def _steps(self, updates: Generator[Update], interrupt: Interrupt) -> Stop:
        while (stop := self._end(interrupt)) is None:
            start = time.perf_counter()
            found = next(updates)
            waited = time.perf_counter() - start
            self.state.waited += waited
            self.record.window.waiting += waited
            self._step(found)
            self.state.position = found.after
            self.record.stepped()
        return stop

    def _end(self, interrupt: Interrupt) -> Stop | None:
        settings, state = self.settings, self.state
        if self.parts.total is not None and state.step >= self.parts.total:
            return "steps"
        if settings.patience is not None and state.waiting >= settings.patience:
            return "patience"
        # One that is stopped stops all: they leave after the same update.
        late = settings.max_seconds is not None and self.record.seconds() >= settings.max_seconds
        rows = self.parts.group.table([late, interrupt.signal or 0])
        if rows[0][0]:
            return "max_seconds"
        interrupt.signal = int(max(row[1] for row in rows)) or None
        return None if interrupt.signal is None else "signal"

    def _step(self, found: Update) -> None:
        """One update: the sum of all losses over the number of all supervised positions."""
        settings, parts, parallel = self.settings, self.parts, self.parts.parallel
        window, guard, step = self.record.window, self.record.guard, self.state.step + 1
        guard.before(step, found.micro, lambda number: self._draw(step, number))
        measure = self.noise is not None and step % settings.log_every == 0
        for i in range(found.passes):
            mine = i < len(found.micro)
            work = found.micro[i].work if mine else self._filler()
            self._draw(step, found.micro[i].number if mine else settings.accumulation)
            with parallel.sums_up(i == found.passes - 1):
                with parts.context():
                    total, nll, balance = parallel(work)
                    loss = total / found.count + balance / found.pieces
                    if parallel.factor != 1.0 or not mine:
                        loss = loss * (parallel.factor if mine else 0.0)
                loss.backward()
            if mine:
                window.add(total.detach(), nll, balance.detach(), found.pieces)
            if measure and i == 0 and self.noise is not None:
                self.noise.small(work.count, found.count)
        if measure and self.noise is not None:
            window.noise = self.noise.large(found.count)
        norm = self._clip()
        guard.after(step, window.loss, norm)
        lr = rate(settings.schedule, step, d_model=parts.model.config.d_model, total=parts.total)
        set_rate(parts.optimizer, lr)
        update(parts.optimizer, guard.bad)
        parts.optimizer.zero_grad(set_to_none=True)
        if parts.ema is not None:
            parts.ema.update()
        window.end(found.count, found.tokens, norm, lr)
        self.state.step = step
        self.state.tokens += found.count

    def _draw(self, step: int, number: int) -> None:
        """Seed what a micro-batch draws (dropout) by its place alone: whichever process runs it, and after
        however many resumptions, draws the same."""
        key = np.random.SeedSequence([self.settings.seed, step, number]).generate_state(1, np.uint64)
        # Only the generators that are drawn from: torch.manual_seed notes a stack trace for each backend.
        torch.default_generator.manual_seed(int(key[0]))
        if self.parts.device.type == "cuda":
            torch.cuda.manual_seed(int(key[0]))

    def _filler(self) -> Work:
        """What a process runs, uncounted, while others have a micro-batch more."""
        if self._fill is None:
            self._fill = Work.of(self.parts.train.largest(), self.parts.device)
        return self._fill

    def _clip(self) -> Tensor:
        """The norm of all gradients; those beyond the limit are scaled down to it."""
        parameters, most = self.parts.parameters, self.settings.clip_norm
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        # To multiply everything by one takes as long as to find out that it is one; only a CPU knows in time.
        small = type(norm) is Tensor and norm.device.type == "cpu" and float(norm) + 1e-6 <= (most or 0.0)
        if most is not None and not small:
            torch.nn.utils.clip_grads_with_norm_(parameters, most, norm)
        return whole(norm)
