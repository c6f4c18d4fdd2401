"""The run file's section on training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from isoform.config.base import Count, Flag, Frozen, Index, NonNegative, Positive
from isoform.data.batching_config import BatchingConfig, Masking
from isoform.training.schedule import Schedule, needs_total

Beta = Annotated[float, Field(strict=True, ge=0.0, lt=1.0)]
Smoothing = Annotated[float, Field(strict=True, ge=0.0, lt=1.0)]
Precision = Literal["float32", "bfloat16_autocast", "float64", "auto"]


class Optimizer(Frozen):
    """AdamW (Loshchilov and Hutter 2019)."""

    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    eps: Positive = 1e-8
    """Added to the root of the second mean."""
    weight_decay: NonNegative = 0.0
    """Shrinks matrices by lr · weight_decay at every update; biases and gains are left alone."""


class Training(Frozen):
    """How a network is fitted (Algorithm 6.1). The first reached of steps, epochs and max_seconds ends it."""

    seed: Index
    """Decides first weights, order of the data and dropout."""
    steps: Count | None = None
    """Updates."""
    epochs: Count | None = None
    """Passes through the training data."""
    max_seconds: Positive | None = None
    """Seconds of training, summed over interruptions; validation and checkpoints count."""
    batches: BatchingConfig
    """What a micro-batch is made of."""
    masking: Masking | None = None
    """Masked-token training of an encoder on plain text."""
    accumulation: Count = 1
    """Micro-batches an update; their losses are summed and divided by the supervised positions of all."""
    schedule: Schedule
    """The learning rate."""
    optimizer: Optimizer = Optimizer()
    """What turns gradients into updates."""
    clip_norm: Positive | None = 1.0
    """The longest gradient, as a Euclidean norm over all parameters; unset: any."""
    label_smoothing: Smoothing = 0.0
    """Eta of (1 - eta) onehot + eta uniform (R34). The NLL is always reported apart."""
    precision: Precision = "float32"
    """Of the arithmetic. "auto" measures float32 against bfloat16_autocast once, keeps the faster one for the
    whole run and writes down which it was."""
    device: str = "auto"
    """A PyTorch device; "auto" takes an accelerator where there is one."""
    compile: Flag = False
    """Whether the stacks go through torch.compile."""
    validate_every: Count | None = None
    """Updates between two validations; unset: as checkpoint_every."""
    patience: Count | None = None
    """Validations without a better NLL after which training stops; unset: never."""
    checkpoint_every: Count = 500
    """Updates between two checkpoints."""
    keep: Count = 2
    """Checkpoints kept besides the best one."""
    average_last: Count = 1
    """At the end, the mean weights of so many last checkpoints compete with the best checkpoint for the
    lowest validation NLL; 1: no mean is made."""
    log_every: Count = 20
    """Updates between two lines of the log."""
    tensorboard: Flag = False
    """Whether the log is also written for TensorBoard (needs the extra of that name)."""

    @model_validator(mode="after")
    def _consistent(self) -> Training:
        if self.steps is None and self.epochs is None and self.max_seconds is None:
            raise ValueError("set steps, epochs or max_seconds: nothing would end the training")
        if needs_total(self.schedule) and self.steps is None and self.epochs is None:
            raise ValueError(f"schedule {self.schedule.kind!r} ends at the last update: set steps or epochs")
        return self

    @property
    def validation_interval(self) -> int:
        """Updates between two validations."""
        return self.validate_every or self.checkpoint_every
