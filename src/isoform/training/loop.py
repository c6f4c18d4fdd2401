"""The training loop (Algorithm 6.1): steps, validations, checkpoints, and the choice of the final weights."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isoform.config.files import write_text
from isoform.errors import ConfigError
from isoform.nn import Stack, Transformer
from isoform.training.checkpoint import Store
from isoform.training.guard import DivergenceError, Guard, Micro
from isoform.training.interrupt import Interrupt
from isoform.training.log import CsvLog, Sink, TensorBoardLog, read_log
from isoform.training.loss import Work, batch_loss
from isoform.training.optimizer import adamw, set_rate, update
from isoform.training.picture import draw_losses
from isoform.training.precision import Chosen, autocast, choose, device_of, dtype_of
from isoform.training.progress import Display
from isoform.training.result import FitResult, Stop
from isoform.training.schedule import rate
from isoform.training.selection import choose_weights
from isoform.training.settings import Training
from isoform.training.state import RunState
from isoform.training.trial import Trial, step_seconds, trial_step
from isoform.training.updates import AnyBatches, Updates, total_steps
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
        self.device = device_of(settings.device)
        self.model = model.to(self.device)
        self.store = Store(folder / "checkpoints")
        self.store.clean()
        self.precision: Chosen = self._precision()
        model.to(dtype_of(self.precision))
        if settings.compile:
            for stack in self._stacks():
                stack.compile(dynamic=True)
        self.optimizer = adamw(model, settings.optimizer)
        self.parameters = list(model.parameters())
        self.total = total_steps(train, settings)
        self.trial = trial
        self.state, remarks = self._begin()
        self.guard = Guard(self.device, where)
        self.sinks: list[Sink] = [CsvLog(folder / "log.csv", self.state.step)]
        if settings.tensorboard:
            self.sinks.append(TensorBoardLog(folder / "tensorboard", self.state.step))
        self.display = Display(
            total=self.total, seconds=settings.max_seconds, done=self.state.step, quiet=quiet
        )
        for remark in remarks:
            self.display.say(remark)
        self.window = Window(self.device, self.state.window)
        self._started, self._before = time.monotonic(), self.state.seconds

    def run(self) -> FitResult:
        """Train until something ends it."""
        try:
            with Interrupt() as interrupt:
                stop = self._steps(interrupt)
            return self._finish(stop, interrupt.signal)
        finally:
            for stack in self._stacks():
                # What `compile` sets: the network is handed back plain.
                stack._compiled_call_impl = None  # pyright: ignore[reportPrivateUsage]
            self.display.close()
            for sink in self.sinks:
                sink.close()

    def _stacks(self) -> list[Stack]:
        return [stack for stack in (self.model.encoder, self.model.decoder) if stack is not None]

    def _context(self) -> Any:
        return autocast(self.precision, self.device)

    def _precision(self) -> Chosen:
        """The setting, or what was measured when the run began: later processes keep to it."""
        path = self.folder / "precision.json"
        if path.is_file():
            return json.loads(path.read_text(encoding="utf-8"))["precision"]
        work: list[Work] = []

        def seconds(precision: Chosen) -> float:
            if not work:
                work.append(Work.of(self.train.largest(), self.device))
            eta = self.settings.label_smoothing
            return step_seconds(
                self.model, work[0], self.device, lambda: autocast(precision, self.device), eta, repeats=3
            )

        chosen, measured = choose(self.settings.precision, seconds)
        if measured:
            write_text(path, json.dumps({"precision": chosen, "seconds_per_step": measured}) + "\n")
        return chosen

    def _begin(self) -> tuple[RunState, list[str]]:
        """Resume, or try one step and start afresh."""
        step, remarks = self.store.latest()
        if step is not None:
            state = self.store.load(step, self.model, self.optimizer, self.device)
            return state, [*remarks, f"resuming after step {step}"]
        if self.trial is None:
            eta = self.settings.label_smoothing
            self.trial = trial_step(self.model, self.train.largest(), self.device, self._context, eta)
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
        if settings.max_seconds is not None and self._seconds() >= settings.max_seconds:
            return "max_seconds"
        return None if interrupt.signal is None else "signal"

    def _steps(self, interrupt: Interrupt) -> Stop:
        self.model.train()
        updates = Updates(self.train, self.settings.accumulation, self.device, self.state)
        batches = iter(updates)
        while (stop := self._end(interrupt)) is None:
            micro, position = next(batches)
            self._step(micro)
            self.state.position = position
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
        self._close(finished=stop != "signal")
        return stop

    def _close(self, *, finished: bool) -> None:
        """Leave a checkpoint of the last update; of a finished run also the last line and validation."""
        unseen = self.validation is not None and self.state.validated_step != self.state.step
        if finished and (unseen or self.window.updates):
            self._close_window(validate=unseen)
            self._save()
        elif self.state.step not in self.store.steps():
            self._save()

    def _check(self) -> None:
        self.guard.check(self.model, self._context, self.settings.label_smoothing)

    def _step(self, micro: list[Micro]) -> None:
        """One update: the sum of all losses over the number of all supervised positions."""
        settings, model = self.settings, self.model
        step = self.state.step + 1
        count = sum(m.work.count for m in micro)
        self.guard.before(step, micro)
        for m in micro:
            with self._context():
                sums = batch_loss(model, m.work, smoothing=settings.label_smoothing)
                loss = sums.loss / count + sums.balance / len(micro)
            loss.backward()
            self.window.add(sums.loss.detach(), sums.nll, sums.balance.detach(), len(micro))
        norm = self._clip()
        self.guard.after(step, self.window.loss, norm)
        lr = rate(settings.schedule, step, d_model=model.config.d_model, total=self.total)
        set_rate(self.optimizer, lr)
        update(self.optimizer, self.guard.bad)
        self.optimizer.zero_grad(set_to_none=True)
        self.window.end(count, sum(m.work.real_tokens for m in micro), norm, lr)
        self.state.step = step
        self.state.tokens += count

    def _clip(self) -> Tensor:
        if self.settings.clip_norm is not None:
            return torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.clip_norm)
        return torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])

    def _close_window(self, validate: bool) -> bool:
        """A line of the log, after a validation where it is time; whether that was the best so far."""
        state = self.state
        line = self.window.line(
            state.step, self._epoch(), self._seconds(), routed=self.model.config.has_experts()
        )
        best = False
        if validate and self.validation is not None:
            nll = self._validate()
            best = state.best_nll is None or nll < state.best_nll
            state.waiting = 0 if best else state.waiting + 1
            state.validated_step = state.step
            if best:
                state.best_step, state.best_nll = state.step, nll
            line = dataclasses.replace(line, validation_nll=nll)
            self.display.validated(line, best)
        if self.window.updates or line.validation_nll is not None:
            for sink in self.sinks:
                sink.write(line)
            self.display.line(line)
        self.window = Window(self.device)
        return best

    def _validate(self) -> float:
        assert self.validation is not None
        nll, _ = mean_nll(self.model, self.validation, self.device, self._context)
        if not math.isfinite(nll):
            raise DivergenceError(f"after step {self.state.step} the validation NLL is {nll}")
        return nll

    def _save(self) -> None:
        """A checkpoint. Between two lines of the log it takes along what the next line will sum up."""
        self._check()
        self.state.seconds, self.state.window = self._seconds(), self.window.to_dict()
        self.store.save(self.state, self.model, self.optimizer, self.device)
        self.store.prune(self._kept())

    def _epoch(self) -> float:
        position = self.state.position
        return position.epoch + position.batch / self.train.count(position.epoch)

    def _average_steps(self) -> list[int]:
        every = self.settings.checkpoint_every
        regular = [step for step in self.store.steps() if step % every == 0]
        return regular[-self.settings.average_last :]

    def _kept(self) -> set[int | None]:
        return {*self.store.steps()[-self.settings.keep :], *self._average_steps(), self.state.best_step}

    def _finish(self, stop: Stop, signal: int | None) -> FitResult:
        """Leave the network with the weights that validation chooses (R35)."""
        state = self.state
        result = FitResult(state, stop, signal, "last", None, self.precision, self.trial)
        if not result.finished:
            return result
        if self.validation is not None:
            weights, nll = choose_weights(
                self.model, self.store, state, self._average_steps(), self._validate, self.display.say
            )
            result = dataclasses.replace(result, weights=weights, validation_nll=nll)
        draw_losses(read_log(self.folder / "log.csv"), self.folder / "loss.png", best_step=state.best_step)
        self.model.eval()
        return result
