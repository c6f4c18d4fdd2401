"""The run file's section on training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from isoform.config.base import Count, Flag, Frozen, NonNegative, Positive
from isoform.data.batching_config import BatchingConfig, Masking
from isoform.training.schedule import Schedule, Share, needs_total

Beta = Annotated[float, Field(strict=True, ge=0.0, lt=1.0)]
Smoothing = Annotated[float, Field(strict=True, ge=0.0, lt=1.0)]
Average = Annotated[float, Field(strict=True, gt=0.0, lt=1.0)]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**63)]  # what PyTorch's generators take
Precision = Literal["float32", "bfloat16_autocast", "float64", "auto"]


class Rate(Frozen):
    """A factor of the learning rate of some parameters."""

    pattern: str
    """Of parameter names, as in a shell: ``head.*``."""
    factor: Positive
    """What their rate is multiplied by."""


class Optimizer(Frozen):
    """AdamW (Loshchilov and Hutter 2019)."""

    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    eps: Positive = 1e-8
    """Added to the root of the second mean."""
    weight_decay: NonNegative = 0.0
    """Shrinks matrices by lr · weight_decay at every update; biases and gains are left alone."""
    layer_decay: Share = 1.0
    """The rate of a layer k below the top is multiplied by layer_decay^k, that of the tables below all layers
    by layer_decay^n (Clark et al. 2020, Appendix B); heads and final norms keep the whole rate."""
    rates: tuple[Rate, ...] = ()
    """Factors of single parameters' rates, on top of layer_decay; where several match, all apply."""


class Distributed(Frozen):
    """How the processes that torchrun starts share the work; one process alone has no use for it.

    Whatever is written here, the same update comes out: micro-batches are dealt out to the processes, and
    losses divided by the supervised positions of all. A run may go on under another choice.
    """

    strategy: Literal["ddp", "fsdp"] = "ddp"
    """"ddp": every process holds the network. "fsdp": each holds a piece of every weight, gradient and
    moment, and checkpoints are written in pieces (FSDP2)."""
    compute: Literal["as_held", "bfloat16"] = "as_held"
    """With fsdp, what layers are gathered and run in."""
    reduce: Literal["as_held", "float32", "bfloat16"] = "as_held"
    """With fsdp, what gradients are summed in."""


class Lora(Frozen):
    """Low-rank adapters: weights stay as they are, increments of low rank are learnt (Hu et al. 2021)."""

    rank: Count
    """Of each increment."""
    alpha: Positive
    """An increment is multiplied by alpha / rank."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)]
    """Patterns of names of linear maps, as in a shell: ``*.feed_forward.body.up``; of a packed map each
    projection has a name: ``*.attention.body.qkv.query``."""
    learn_whole: tuple[str, ...] = ()
    """Patterns of parameter names that learn as they are beside the increments, such as a new head's."""


class WandB(Frozen):
    """Where Weights & Biases keeps the log (needs the extra of that name)."""

    project: str
    """The project's name."""
    name: str | None = None
    """The run's name; unset: chosen there."""
    mode: Literal["online", "offline"] = "online"
    """"offline" writes into the run's folder, to be uploaded by ``wandb sync``."""


class Training(Frozen):
    """How a network is fitted (Algorithm 6.1). The first reached of steps, epochs and max_seconds ends it."""

    seed: Seed
    """Decides first weights, order of the data and dropout."""
    data_seed: Seed | None = None
    """Decides the order of the data instead of the seed, so that runs of several seeds read the same
    batches."""
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
    z_loss: NonNegative = 0.0
    """Weight of (log Σ exp scores)² in the loss, which keeps scores near log-probabilities (Chowdhery et al.
    2022, §5)."""
    lora: Lora | None = None
    """Low-rank adapters instead of the weights; they are saved apart."""
    freeze: tuple[str, ...] = ()
    """Patterns of parameter names, as in a shell (``embedding.*``), that keep their first values."""
    ema: Average | None = None
    """Decay of a running mean of the weights after every update; with it, validation reads the mean, and the
    run ends with it."""
    precision: Precision = "float32"
    """Of the arithmetic. "auto" measures float32 against bfloat16_autocast once, keeps the faster one for the
    whole run and writes down which it was."""
    device: str = "auto"
    """A PyTorch device; "auto" takes an accelerator where there is one."""
    compile: Flag = False
    """Whether the stacks go through torch.compile."""
    recompute: Flag = False
    """Whether each layer's intermediates are computed again in the backward pass instead of being held."""
    distributed: Distributed = Distributed()
    """How several processes share the work."""
    validate_every: Count | None = None
    """Updates between two validations; unset: as checkpoint_every."""
    patience: Count | None = None
    """Validations without a better NLL after which training stops; unset: never."""
    checkpoint_every: Count = 500
    """Updates between two checkpoints."""
    keep: Count = 2
    """Checkpoints kept besides the best ones."""
    keep_best: Count = 1
    """How many of the best by validation NLL are kept."""
    average_last: Count = 1
    """At the end, the mean weights of so many last checkpoints compete with the best checkpoint for the
    lowest validation NLL; 1: no mean is made."""
    average_best: Count = 1
    """As average_last, of the best checkpoints; keep_best has to be as large."""
    log_every: Count = 20
    """Updates between two lines of the log."""
    tensorboard: Flag = False
    """Whether the log is also written for TensorBoard (needs the extra of that name)."""
    wandb: WandB | None = None
    """Whether the log also goes to Weights & Biases."""
    gradient_noise: Flag = False
    """Whether the log estimates the gradient noise scale (McCandlish et al. 2018, appendix A.1): the batch,
    in supervised positions, beyond which larger ones gain little. Needs accumulation and a single process."""

    @model_validator(mode="after")
    def _consistent(self) -> Training:
        if self.steps is None and self.epochs is None and self.max_seconds is None:
            raise ValueError("set steps, epochs or max_seconds: nothing would end the training")
        if needs_total(self.schedule) and self.steps is None and self.epochs is None:
            raise ValueError(f"schedule {self.schedule.kind!r} ends at the last update: set steps or epochs")
        if self.lora is not None and self.freeze:
            raise ValueError("freeze has nothing to say beside lora, which lets only adapters learn")
        if self.average_best > self.keep_best:
            raise ValueError(f"average_best = {self.average_best} needs keep_best to be as large")
        if self.gradient_noise and self.accumulation < 2:
            raise ValueError(
                "gradient_noise compares a micro-batch with the update: set accumulation to 2 or more"
            )
        return self

    @property
    def order_seed(self) -> int:
        """What the order of the data comes from."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def validation_interval(self) -> int:
        """Updates between two validations."""
        return self.validate_every or self.checkpoint_every
