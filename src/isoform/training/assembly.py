"""The parts of a run, put together as its processes hold them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isoform.config.files import read, write
from isoform.errors import ConfigError
from isoform.nn import Transformer
from isoform.training.checkpoint import Store
from isoform.training.ema import Ema
from isoform.training.group import Group, present
from isoform.training.learner import Learner
from isoform.training.learnt import Learnt, fill
from isoform.training.loss import Work
from isoform.training.optimizer import adamw, freeze
from isoform.training.parallel import Alone, parallelise, stacks
from isoform.training.precision import Chosen, Measured, autocast, choose, device_of, dtype_of
from isoform.training.recompute import recompute_layers
from isoform.training.settings import Training
from isoform.training.state import RunState
from isoform.training.trial import Trial, step_seconds, trial_step
from isoform.training.updates import AnyBatches, total_steps, uneven_shares


class Assembly:
    """Network, optimizer, running mean and checkpoints of a run.

    Args:
        given: the network; it is trained in place, or filled at the end where the processes hold pieces.
        train: what is learnt from.
        validation: what chooses; None without.
        settings: the run file's section.
        folder: the run's.
        trial: the step tried before; None: it is tried here, unless the run is resumed.

    Raises:
        ConfigError: settings that do not go together.
    """

    def __init__(
        self,
        given: Transformer,
        train: AnyBatches,
        validation: AnyBatches | None,
        settings: Training,
        folder: Path,
        trial: Trial | None,
    ) -> None:
        self.group: Group = present()
        _refuse_misfit(settings, validation, self.group)
        self.train, self.validation, self.settings, self.folder = train, validation, settings, folder
        self.device = device_of(settings.device)
        self.given = given.to(self.device)
        freeze(given, settings.freeze)
        self.store = Store(folder / "checkpoints")
        self.group.from_first(self.store.clean)
        self._learner = Learner.of(given, settings)
        self.precision: Chosen = self.group.from_first(self._precision)
        given.to(dtype_of(self.precision))
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

    def context(self) -> Any:
        """What a pass runs in."""
        return autocast(self.precision, self.device)

    def begin(self) -> tuple[RunState, list[str]]:
        """Resume, or try one step and start afresh; with what there is to say of it."""
        step, remarks = self.group.from_first(self.store.latest)
        uneven = uneven_shares(self.settings.accumulation, self.group.size)
        remarks = remarks if uneven is None else [*remarks, uneven]
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

    def gather(self) -> None:
        """Fill the given network where the processes hold pieces of another."""
        if self.given is not self.model:
            fill(self.given, self.parallel.gathered(), "gathered weights")

    def release(self) -> None:
        """Hand the network back plain."""
        for stack in stacks(self.model):
            # What `compile` sets.
            stack._compiled_call_impl = None  # pyright: ignore[reportPrivateUsage]
        recompute_layers(self.model, False)

    def _share_out(self) -> Alone:
        """The network as its processes hold it."""
        settings = self.settings
        unused = False
        if not self.group.alone and settings.distributed.strategy == "ddp":
            if self.trial is None:
                self.trial = self._trial()
            unused = bool(self.trial.without_gradient)
        return parallelise(self._learner, self.group, settings.distributed, self.device, unused=unused)

    def _trial(self) -> Trial:
        return trial_step(self._learner, self.train.largest(), self.device, self.context)

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
            return step_seconds(self._learner, work[0], self.device, context, repeats=3)

        chosen, measured = choose(self.settings.precision, seconds)
        if measured:
            write(Measured(precision=chosen, seconds_per_step=measured), path)
        return chosen


def _refuse_misfit(settings: Training, validation: AnyBatches | None, group: Group) -> None:
    if validation is None and (settings.patience is not None or settings.average_last > 1):
        raise ConfigError("training.patience and training.average_last need a validation part to judge by")
    if settings.gradient_noise and not group.alone:
        raise ConfigError("training.gradient_noise: measured in a single process only")
