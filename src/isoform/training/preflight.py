"""What can be known about a run before its first step."""

from __future__ import annotations

import dataclasses
from typing import Any

from isoform.config import ModelConfig
from isoform.data.batching import Batch, LabelledBatch
from isoform.data.parts import Part
from isoform.data.pipeline import Prepared
from isoform.data.preflight import Preflight
from isoform.errors import DataError
from isoform.nn import Transformer
from isoform.training.learner import Learner
from isoform.training.precision import autocast, device_of, dtype_of
from isoform.training.schedule import Constant
from isoform.training.settings import Training
from isoform.training.trial import Trial, trial_step
from isoform.training.updates import total_steps

SPECIALS = 2  # ids that a template puts around a text, at most


@dataclasses.dataclass(frozen=True)
class RunPreflight:
    """The data, the network and one step of it.

    Attributes:
        data: counts, faults, lengths and samples.
        parameters: of the network, shared ones once.
        trial: a step on the largest batch.
        steps_per_epoch: updates a pass through the training data takes.
        steps: number of the last update; None where only time ends the run.
        epochs: passes that is.
        seconds: what that takes at the speed of the trial step, scaled to the average batch; validation and
            checkpoints come on top.
        padding_share: of the ids in training batches.
        warmup: updates until the schedule's full rate; None where it has none.
    """

    data: Preflight
    parameters: int
    trial: Trial
    steps_per_epoch: float
    steps: int | None
    epochs: float | None
    seconds: float | None
    padding_share: float
    warmup: int | None

    @property
    def remarks(self) -> list[str]:
        """What does not stop a run and should be known."""
        found = list(self.data.remarks)
        if self.trial.without_gradient:
            names = ", ".join(self.trial.without_gradient)
            found.append(f"the largest batch leaves these parameters without a gradient: {names}")
        if self.warmup is not None and self.steps is not None and self.warmup >= self.steps:
            found.append(
                f"the schedule warms up for {self.warmup:,} updates and the run ends after {self.steps:,}:"
                " the full rate is never reached"
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        plain = {name: getattr(self, name) for name in _NUMBERS}
        return {**self.data.to_dict(), "remarks": self.remarks, **plain, "trial": self.trial.to_dict()}


_NUMBERS = ("parameters", "steps_per_epoch", "steps", "epochs", "seconds", "padding_share")


def preflight(model: Transformer, prepared: Prepared, settings: Training) -> RunPreflight:
    """Try a run without training: one forward and backward pass on the largest batch.

    Raises:
        SupervisionError, ConfigError, DivergenceError: as `trial_step`.
        DataError: a text longer than the network has positions for.
    """
    refuse_too_long(model.config, prepared)
    device = device_of(settings.device)
    precision = "float32" if settings.precision == "auto" else settings.precision
    model.to(device=device, dtype=dtype_of(precision))
    train = prepared.train.batches
    learner = Learner.of(model, settings)
    trial = trial_step(learner, train.largest(), device, lambda: autocast(precision, device))
    batches, filled = train.count(0), train.report(0)
    per_epoch = batches / settings.accumulation
    steps = total_steps(train, settings)
    mean_tokens = (filled.real_tokens + filled.padding_tokens) / batches
    step_seconds = trial.seconds * mean_tokens / trial.tokens * settings.accumulation
    return RunPreflight(
        data=prepared.preflight,
        parameters=sum(p.numel() for p in model.parameters()),
        trial=trial,
        steps_per_epoch=per_epoch,
        steps=steps,
        epochs=None if steps is None else steps / per_epoch,
        seconds=None if steps is None else steps * step_seconds,
        padding_share=filled.share,
        warmup=None if isinstance(settings.schedule, Constant) else settings.schedule.warmup,
    )


def refuse_too_long(cfg: ModelConfig, prepared: Prepared) -> None:
    """Refuse rows, or documents packed into rows, beyond a learned table of positions, before training comes
    upon them.

    Raises:
        DataError: names the part and both lengths.
    """
    limit = cfg.max_positions()
    if limit is None:
        return
    for name in prepared.preflight.parts:
        stored = name == "train" and prepared.train.stored is not None
        if not stored and _surely_fits(prepared, name, limit):
            continue
        part = {"train": prepared.train, "validation": prepared.validation}.get(name) or prepared.test()
        longest = 0 if part is None else _longest(part)
        if longest > limit:
            what = "rows" if part is None or prepared.task.batching.kind != "packed" else "documents"
            raise DataError(
                f"{name}: {what} of up to {longest} tokens, the network has {limit} positions; raise"
                " max_positions, or limit the data's length"
            )


def _longest(part: Part) -> int:
    if part.stored is not None and part.fit is not None:
        return max(part.stored.state.longest.values())
    if part.stored is not None:
        return _length(part.batches.largest())
    return max(_length(batch) for batch in part.batches.epoch(0))


def _surely_fits(prepared: Prepared, name: str, limit: int) -> bool:
    """Whether all ids of a record together are fewer than the positions: the usual case, seen at once."""
    sides = prepared.preflight.parts[name].sides.values()
    return sum(side.lengths["max"] + SPECIALS for side in sides) <= limit


def _length(batch: Batch | LabelledBatch) -> int:
    """Positions that a batch asks for; those of packed documents begin anew at each."""
    if isinstance(batch, LabelledBatch):
        return batch.tokens.length
    tokens = batch.decoder_input
    own = tokens.length if tokens.documents is None else int(tokens.positions().max()) + 1
    return max(own, 0 if batch.source is None else batch.source.length)
