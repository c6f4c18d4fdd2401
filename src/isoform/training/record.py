"""What a run leaves while it goes on and at its end: the log, validations, checkpoints, the result."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from contextlib import nullcontext

from isoform.training.assembly import Assembly
from isoform.training.checkpoint import DiskError
from isoform.training.guard import DivergenceError, Guard
from isoform.training.log import CsvLog, Line, Sink, TensorBoardLog, WandBLog, read_log
from isoform.training.picture import draw_losses
from isoform.training.progress import Display
from isoform.training.result import FitResult, Stop
from isoform.training.selection import Candidates, choose_weights
from isoform.training.state import RunState
from isoform.training.validation import mean_nll
from isoform.training.window import Window


class Record:
    """Keeps what the steps come to; writes by the first process alone.

    Args:
        run: the parts of the run.
        state: where it stands; validations are entered here.
        remarks: what there is to say before the first step.
        where: names the sample of a row, for messages.
        quiet: no bar and no remarks.
    """

    def __init__(
        self,
        run: Assembly,
        state: RunState,
        remarks: list[str],
        where: Callable[[int], str],
        *,
        quiet: bool,
    ) -> None:
        self.run, self.state = run, state
        self.guard = Guard(run.device, where)
        self._sinks: list[Sink] = []
        run.group.from_first(lambda: self._open_sinks(quiet))
        self.display = Display(
            total=run.total,
            seconds=run.settings.max_seconds,
            done=state.step,
            quiet=quiet or not run.group.first,
        )
        for remark in remarks:
            self.display.say(remark)
        self.window = Window(run.device, run.group, state.window)
        self._started, self._before = time.monotonic(), state.seconds

    def _open_sinks(self, quiet: bool) -> None:
        settings, folder = self.run.settings, self.run.folder
        self._sinks.append(CsvLog(folder / "log.csv", self.state.step))
        if settings.tensorboard:
            self._sinks.append(TensorBoardLog(folder / "tensorboard", self.state.step))
        if settings.wandb is not None:
            chosen = settings.model_dump(mode="json", exclude={"wandb", "tensorboard"})
            self._sinks.append(WandBLog(folder, settings.wandb, chosen, quiet=quiet))

    def seconds(self) -> float:
        """Time spent training, by all processes that have carried the run on one after the other."""
        return self._before + time.monotonic() - self._started

    def check(self) -> None:
        """Wait for the device.

        Raises:
            DivergenceError: a step was not finite.
        """
        self.guard.check(self.run.parallel.learner, self.run.context, self.run.group)

    def stepped(self) -> None:
        """An update was made: look at it, and write what is due after it."""
        step, settings = self.state.step, self.run.settings
        if self.run.device.type == "cpu" or step % settings.log_every == 0:
            self.check()
        self.display.step(step, self.seconds())
        save = step % settings.checkpoint_every == 0
        validate = step % settings.validation_interval == 0
        if save or validate or step % settings.log_every == 0:
            best = self._close_window(validate)
            if save or best:
                self._save()

    def stopped(self, stop: Stop) -> None:
        """Leave a checkpoint of the last update; of a finished run also the last line and validation."""
        self.check()
        unseen = self.run.validation is not None and self.state.validated_step != self.state.step
        if stop != "signal" and (unseen or self.window.updates):
            self._close_window(validate=unseen)
            self._save()
        elif self.run.group.from_first(lambda: self._unsaved(stop)):
            self._save()

    def result(self, stop: Stop, signal: int | None) -> FitResult:
        """Leave the network with the weights that validation chooses (R35)."""
        run, state = self.run, self.state
        result = FitResult(state, stop, signal, "last", None, run.precision, run.trial)
        if not result.finished:
            return result
        if run.validation is not None:
            candidates, faults = run.group.from_first(self._candidates)
            for fault in faults:
                self.display.say(fault)
            weights, nll = choose_weights(run.model, run.store, candidates, self._validate, self.display.say)
            result = dataclasses.replace(result, weights=weights, validation_nll=nll)
        elif run.ema is not None:
            run.ema.put()
        run.gather()
        if run.group.first:
            lines = read_log(run.folder / "log.csv")
            draw_losses(lines, run.folder / "loss.png", best_step=state.best_step)
        run.given.eval()
        return result

    def close(self) -> None:
        """Leave the terminal and the logs as they should be."""
        self.display.close()
        for sink in self._sinks:
            sink.close()

    def _close_window(self, validate: bool) -> bool:
        """A line of the log, after a validation where it is time; whether that was among the best so far."""
        state = self.state
        line = self.window.line(
            state.step, self._epoch(), self.seconds(), routed=self.run.model.config.has_experts()
        )
        best = entered = False
        if validate and self.run.validation is not None:
            with nullcontext() if self.run.ema is None else self.run.ema.in_place():
                nll = self._validate()
            best = state.best_nll is None or nll < state.best_nll
            state.waiting = 0 if best else state.waiting + 1
            state.validated_step = state.step
            ranked = sorted([*state.ranking, (nll, state.step)])[: self.run.settings.keep_best]
            entered, state.ranking = ranked != state.ranking, ranked
            if best:
                state.best_step, state.best_nll = state.step, nll
            line = dataclasses.replace(line, validation_nll=nll)
            self.display.validated(line, best)
        if self.window.updates or line.validation_nll is not None:
            self.run.group.from_first(lambda: self._write(line))
            self.display.line(line)
        self.window = Window(self.run.device, self.run.group)
        return entered

    def _write(self, line: Line) -> None:
        try:
            for sink in self._sinks:
                sink.write(line)
        except OSError as error:
            raise DiskError(
                f"{self.run.folder / 'log.csv'}: the line of step {line.step} cannot be written:"
                f" {error.strerror or error}; with room on the disk the same command goes on from the last"
                " checkpoint"
            ) from None

    def _validate(self) -> float:
        run = self.run
        assert run.validation is not None
        learner = None if run.group.alone else run.parallel
        nll, _ = mean_nll(
            run.model, run.validation, run.device, run.context, learner=learner, group=run.group
        )
        run.parallel.settle()
        if not math.isfinite(nll):
            raise DivergenceError(f"after step {self.state.step} the validation NLL is {nll}")
        return nll

    def _save(self) -> None:
        """A checkpoint. Between two lines of the log it takes along what the next line will sum up."""
        self.check()
        self.state.seconds, self.state.window = self.seconds(), self.window.to_dict()
        store = self.run.store
        store.save(self.state, self.run.learnt, self.run.group)
        self.run.group.from_first(lambda: store.prune(self._kept()))

    def _unsaved(self, stop: Stop) -> bool:
        """Whether the last checkpoint lacks the last update, or the time that ended the run: begun again, the
        run has to end at once."""
        limit = self.run.settings.max_seconds
        short = stop == "max_seconds" and limit is not None and self.state.seconds < limit
        return short or self.state.step not in self.run.store.steps()

    def _epoch(self) -> float:
        position = self.state.position
        return position.epoch + position.batch / self.run.train.count(position.epoch)

    def _candidates(self) -> tuple[Candidates, list[str]]:
        """What the run may end with, and a line for each checkpoint that is not whole any more."""
        store, ranking = self.run.store, self.state.ranking
        last, best = self._average_steps(), ranking[: self.run.settings.average_best]
        faults = {step: store.fault(step) for step in sorted({*last, *(step for _, step in ranking)})}
        found = Candidates(
            newest=self.state.step,
            ranking=tuple((nll, step) for nll, step in ranking if faults[step] is None),
            means={
                "last": [step for step in last if faults[step] is None],
                "best": [step for _, step in best if faults[step] is None],
            },
        )
        return found, [f"{store.path(s)}: {why}; it is left out" for s, why in faults.items() if why]

    def _average_steps(self) -> list[int]:
        every = self.run.settings.checkpoint_every
        regular = [step for step in self.run.store.steps() if step % every == 0]
        return regular[-self.run.settings.average_last :]

    def _kept(self) -> set[int | None]:
        best = (step for _, step in self.state.ranking)
        return {*self.run.store.steps()[-self.run.settings.keep :], *self._average_steps(), *best}
