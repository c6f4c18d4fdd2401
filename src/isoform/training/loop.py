"""The training loop (Algorithm 6.1): steps, validations, checkpoints, and the choice of the final weights."""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isoform.config.files import read, write
from isoform.errors import ConfigError
from isoform.nn import Transformer
from isoform.training.checkpoint import Learnt, Store, fill
from isoform.training.ema import Ema
from isoform.training.group import Group, present
from isoform.training.guard import DivergenceError, Guard
from isoform.training.interrupt import Interrupt
from isoform.training.learner import Learner
from isoform.training.log import CsvLog, Sink, TensorBoardLog, WandBLog, read_log
from isoform.training.loss import Work
from isoform.training.noise import NoiseScale
from isoform.training.optimizer import adamw, freeze, set_rate, update
from isoform.training.parallel import Alone, parallelise, stacks, whole
from isoform.training.picture import draw_losses
from isoform.training.precision import (
    Chosen,
    Measured,
    autocast,
    choose,
    device_of,
    dtype_of,
    exact_products,
)
from isoform.training.progress import Display
from isoform.training.recompute import recompute_layers
from isoform.training.result import FitResult, Stop
from isoform.training.schedule import rate
from isoform.training.selection import choose_weights
from isoform.training.settings import Training
from isoform.training.state import RunState
from isoform.training.trial import Trial, step_seconds, trial_step
from isoform.training.updates import AnyBatches, Update, Updates, total_steps
from isoform.training.validation import mean_nll
from isoform.training.window import Window


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
    return _Loop(model, train, validation, settings, folder, where, quiet, trial).run()


class _Loop:
    def __init__(
        self,
        model: Transformer,
        train: AnyBatches,
        validation: AnyBatches | None,
        settings: Training,
        folder: Path,
        where: Callable[[int], str],
        quiet: bool,
        trial: Trial | None,
    ) -> None:
        if validation is None and (settings.patience is not None or settings.average_last > 1):
            raise ConfigError(
                "training.patience and training.average_last need a validation part to judge by"
            )
        self.settings, self.folder, self.train, self.validation = settings, folder, train, validation
        self.group: Group = present()
        if settings.gradient_noise and not self.group.alone:
            raise ConfigError("training.gradient_noise: measured in a single process only")
        self.device = device_of(settings.device)
        self.given = model.to(self.device)
        freeze(model, settings.freeze)
        self.store = Store(folder / "checkpoints")
        self.group.from_first(self.store.clean)
        self.learner = Learner.of(model, settings)
        self.precision: Chosen = self.group.from_first(self._precision)
        model.to(dtype_of(self.precision))
        self.trial = trial
        self.parallel: Alone = self._share_out()
        self.model = self.parallel.model
        recompute_layers(self.model, settings.recompute)
        if settings.compile:
            for stack in stacks(self.model):
                stack.compile(dynamic=True)
        self.optimizer = adamw(self.model, settings.optimizer)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.ema = None if settings.ema is None else Ema(self.model, settings.ema)
        self.learnt = Learnt(self.model, self.optimizer, self.ema, self.device)
        self.total = total_steps(train, settings)
        self.state, remarks = self._begin()
        self.guard = Guard(self.device, where)
        self.noise = NoiseScale(self.parameters) if settings.gradient_noise else None
        self.sinks: list[Sink] = self._sinks() if self.group.first else []
        self.display = Display(
            total=self.total,
            seconds=settings.max_seconds,
            done=self.state.step,
            quiet=quiet or not self.group.first,
        )
        for remark in remarks:
            self.display.say(remark)
        self.window = Window(self.device, self.group, self.state.window)
        self._fill: Work | None = None
        self._started, self._before = time.monotonic(), self.state.seconds

    def run(self) -> FitResult:
        """Train until something ends it."""
        try:
            with Interrupt() as interrupt, exact_products(self.device):
                stop = self._steps(interrupt)
            return self._finish(stop, interrupt.signal)
        finally:
            for stack in stacks(self.model):
                # What `compile` sets: the network is handed back plain.
                stack._compiled_call_impl = None  # pyright: ignore[reportPrivateUsage]
            recompute_layers(self.model, False)
            self.display.close()
            for sink in self.sinks:
                sink.close()

    def _sinks(self) -> list[Sink]:
        settings = self.settings
        found: list[Sink] = [CsvLog(self.folder / "log.csv", self.state.step)]
        if settings.tensorboard:
            found.append(TensorBoardLog(self.folder / "tensorboard", self.state.step))
        if settings.wandb is not None:
            found.append(WandBLog(self.folder, settings.wandb))
        return found

    def _share_out(self) -> Alone:
        """The network as its processes hold it."""
        settings = self.settings
        unused = False
        if not self.group.alone and settings.distributed.strategy == "ddp":
            if self.trial is None:
                self.trial = self._trial()
            unused = bool(self.trial.without_gradient)
        return parallelise(self.learner, self.group, settings.distributed, self.device, unused=unused)

    def _trial(self) -> Trial:
        return trial_step(self.learner, self.train.largest(), self.device, self._context)

    def _context(self) -> Any:
        return autocast(self.precision, self.device)

    def _precision(self) -> Chosen:
        """The setting, or what was measured when the run began: later processes keep to it."""
        path = self.folder / "precision.json"
        if path.is_file():
            return read(Measured, path).precision
        work: list[Work] = []

        def seconds(precision: Chosen) -> float:
            if not work:
                work.append(Work.of(self.train.largest(), self.device))
            context = lambda: autocast(precision, self.device)  # noqa: E731
            return step_seconds(self.learner, work[0], self.device, context, repeats=3)

        chosen, measured = choose(self.settings.precision, seconds)
        if measured:
            write(Measured(precision=chosen, seconds_per_step=measured), path)
        return chosen

    def _begin(self) -> tuple[RunState, list[str]]:
        """Resume, or try one step and start afresh."""
        step, remarks = self.group.from_first(self.store.latest)
        if step is not None:
            state = self.store.load(step, self.learnt)
            return state, [*remarks, f"resuming after step {step}"]
        if self.trial is None:
            self.trial = self._trial()
        seed = self.settings.seed
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        return RunState(), remarks

    def _seconds(self) -> float:
        return self._before + time.monotonic() - self._started

    def _end(self, interrupt: Interrupt) -> Stop | None:
        settings, state = self.settings, self.state
        if self.total is not None and state.step >= self.total:
            return "steps"
        if settings.patience is not None and state.waiting >= settings.patience:
            return "patience"
        # One that is stopped stops all: they leave after the same update.
        late = settings.max_seconds is not None and self._seconds() >= settings.max_seconds
        rows = self.group.table([late, interrupt.signal or 0])
        if rows[0][0]:
            return "max_seconds"
        interrupt.signal = int(max(row[1] for row in rows)) or None
        return None if interrupt.signal is None else "signal"

    def _steps(self, interrupt: Interrupt) -> Stop:
        self.model.train()
        updates = Updates(self.train, self.settings.accumulation, self.device, self.state, self.group)
        batches = iter(updates)
        while (stop := self._end(interrupt)) is None:
            start = time.perf_counter()
            found = next(batches)
            self.window.waiting += time.perf_counter() - start
            self._step(found)
            self.state.position = found.after
            step, settings = self.state.step, self.settings
            if self.device.type == "cpu" or step % settings.log_every == 0:
                self._check()
            self.display.step(step, self._seconds())
            save = step % settings.checkpoint_every == 0
            validate = step % settings.validation_interval == 0
            if save or validate or step % settings.log_every == 0:
                best = self._close_window(validate)
                if save or best:
                    self._save()
        self._check()
        self._close(stop)
        return stop

    def _close(self, stop: Stop) -> None:
        """Leave a checkpoint of the last update; of a finished run also the last line and validation."""
        unseen = self.validation is not None and self.state.validated_step != self.state.step
        if stop != "signal" and (unseen or self.window.updates):
            self._close_window(validate=unseen)
            self._save()
        elif self.group.from_first(lambda: self._unsaved(stop)):
            self._save()

    def _unsaved(self, stop: Stop) -> bool:
        """Whether the last checkpoint lacks the last update, or the time that ended the run: begun again, the
        run has to end at once."""
        limit = self.settings.max_seconds
        short = stop == "max_seconds" and limit is not None and self.state.seconds < limit
        return short or self.state.step not in self.store.steps()

    def _check(self) -> None:
        self.guard.check(self.parallel.learner, self._context, self.group)

    def _step(self, found: Update) -> None:
        """One update: the sum of all losses over the number of all supervised positions."""
        settings, parallel = self.settings, self.parallel
        step = self.state.step + 1
        self.guard.before(step, found.micro, lambda number: self._draw(step, number))
        measure = self.noise is not None and step % settings.log_every == 0
        for i in range(found.passes):
            mine = i < len(found.micro)
            work = found.micro[i].work if mine else self._filler()
            self._draw(step, found.micro[i].number if mine else settings.accumulation)
            with parallel.sums_up(i == found.passes - 1):
                with self._context():
                    total, nll, balance = parallel(work)
                    loss = total / found.count + balance / found.pieces
                    if parallel.factor != 1.0 or not mine:
                        loss = loss * (parallel.factor if mine else 0.0)
                loss.backward()
            if mine:
                self.window.add(total.detach(), nll, balance.detach(), found.pieces)
            if measure and i == 0 and self.noise is not None:
                self.noise.small(work.count, found.count)
        if measure and self.noise is not None:
            self.window.noise = self.noise.large(found.count)
        norm = self._clip()
        self.guard.after(step, self.window.loss, norm)
        lr = rate(settings.schedule, step, d_model=self.model.config.d_model, total=self.total)
        set_rate(self.optimizer, lr)
        update(self.optimizer, self.guard.bad)
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update()
        self.window.end(found.count, found.tokens, norm, lr)
        self.state.step = step
        self.state.tokens += found.count

    def _draw(self, step: int, number: int) -> None:
        """Seed what a micro-batch draws (dropout) by its place alone: whichever process runs it, and after
        however many resumptions, draws the same."""
        key = np.random.SeedSequence([self.settings.seed, step, number]).generate_state(1, np.uint64)
        # Only the generators that are drawn from: torch.manual_seed notes a stack trace for each backend.
        torch.default_generator.manual_seed(int(key[0]))
        if self.device.type == "cuda":
            torch.cuda.manual_seed(int(key[0]))

    def _filler(self) -> Work:
        """What a process runs, uncounted, while others have a micro-batch more."""
        if self._fill is None:
            self._fill = Work.of(self.train.largest(), self.device)
        return self._fill

    def _clip(self) -> Tensor:
        if self.settings.clip_norm is not None:
            return whole(torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.clip_norm))
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        return whole(torch.nn.utils.get_total_norm(gradients))

    def _close_window(self, validate: bool) -> bool:
        """A line of the log, after a validation where it is time; whether that was among the best so far."""
        state = self.state
        line = self.window.line(
            state.step, self._epoch(), self._seconds(), routed=self.model.config.has_experts()
        )
        best = entered = False
        if validate and self.validation is not None:
            with nullcontext() if self.ema is None else self.ema.in_place():
                nll = self._validate()
            best = state.best_nll is None or nll < state.best_nll
            state.waiting = 0 if best else state.waiting + 1
            state.validated_step = state.step
            ranked = sorted([*state.ranking, (nll, state.step)])[: self.settings.keep_best]
            entered, state.ranking = ranked != state.ranking, ranked
            if best:
                state.best_step, state.best_nll = state.step, nll
            line = dataclasses.replace(line, validation_nll=nll)
            self.display.validated(line, best)
        if self.window.updates or line.validation_nll is not None:
            for sink in self.sinks:
                sink.write(line)
            self.display.line(line)
        self.window = Window(self.device, self.group)
        return entered

    def _validate(self) -> float:
        assert self.validation is not None
        learner = None if self.group.alone else self.parallel
        nll, _ = mean_nll(
            self.model, self.validation, self.device, self._context, learner=learner, group=self.group
        )
        self.parallel.settle()
        if not math.isfinite(nll):
            raise DivergenceError(f"after step {self.state.step} the validation NLL is {nll}")
        return nll

    def _save(self) -> None:
        """A checkpoint. Between two lines of the log it takes along what the next line will sum up."""
        self._check()
        self.state.seconds, self.state.window = self._seconds(), self.window.to_dict()
        self.store.save(self.state, self.learnt, self.group)
        self.group.from_first(lambda: self.store.prune(self._kept()))

    def _epoch(self) -> float:
        position = self.state.position
        return position.epoch + position.batch / self.train.count(position.epoch)

    def _average_steps(self) -> list[int]:
        every = self.settings.checkpoint_every
        regular = [step for step in self.store.steps() if step % every == 0]
        return regular[-self.settings.average_last :]

    def _kept(self) -> set[int | None]:
        best = (step for _, step in self.state.ranking)
        return {*self.store.steps()[-self.settings.keep :], *self._average_steps(), *best}

    def _finish(self, stop: Stop, signal: int | None) -> FitResult:
        """Leave the network with the weights that validation chooses (R35)."""
        state = self.state
        result = FitResult(state, stop, signal, "last", None, self.precision, self.trial)
        if not result.finished:
            return result
        if self.validation is not None:
            best = [step for _, step in state.ranking[: self.settings.average_best]]
            means = self.group.from_first(lambda: {"last": self._average_steps(), "best": best})
            weights, nll = choose_weights(
                self.model, self.store, state, means, self._validate, self.display.say
            )
            result = dataclasses.replace(result, weights=weights, validation_nll=nll)
        elif self.ema is not None:
            self.ema.put()
        if self.given is not self.model:
            fill(self.given, self.parallel.gathered(), "gathered weights")
        if self.group.first:
            lines = read_log(self.folder / "log.csv")
            draw_losses(lines, self.folder / "loss.png", best_step=state.best_step)
        self.given.eval()
        return result
