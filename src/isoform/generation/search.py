"""Which token comes next: the second part of generation, as values (Algorithm 6.2)."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from isoform.errors import ConfigError, did_you_mean
from isoform.generation.stopping import Constraints, Stopping

LengthPenalty = Literal["none", "length", "gnmt"]
EarlyStopping = Literal["when_full", "heuristic", "never"]


@dataclasses.dataclass(frozen=True, eq=False)
class Hypothesis:
    """One output.

    Args:
        ids: the new tokens, without the prompt and without the EOS that ended them.
        log_probability: sum of the log-probabilities of the tokens, the EOS included.
        score: what outputs of one sample are ranked by: ``log_probability`` over the length penalty.
        finished: it came to its end; False: it was cut at ``max_new_tokens``.
        logits: ``[steps, V]`` what each token was chosen from, if asked for.
    """

    ids: list[int]
    log_probability: float
    score: float
    finished: bool
    logits: Float[Tensor, "steps vocab"] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """What a search is told when it begins.

    Args:
        samples: how many prompts there are.
        limit: the most tokens an output may have.
        constraints: what may not be chosen.
        stopping: which outputs are complete.
        eos_ids: ids that are taken off the end of an output.
        keys: one number a sample, made from its tokens alone; seeds its random numbers.
        keep_logits: whether hypotheses carry their logits.
    """

    samples: int
    limit: int
    constraints: Constraints
    stopping: Stopping
    eos_ids: tuple[int, ...]
    keys: tuple[int, ...]
    keep_logits: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """What is fed to the network next.

    Args:
        tokens: ``[R]`` one token a row.
        rows: ``[R]`` the row of the step before that each one continues; None: its own.
        same_sample: rows only changed places within their sample, and none came or went.
    """

    tokens: Int[Tensor, " rows"]
    rows: Int[Tensor, " rows"] | None = None
    same_sample: bool = False


class Chooser(Protocol):
    """A search under way."""

    def choose(self, logits: Float[Tensor, "rows vocab"]) -> Choice | None:
        """Take one step; None when every output is complete. First called with one row a sample."""
        ...

    def outputs(self) -> list[list[Hypothesis]]:
        """For each sample its outputs, the best first."""
        ...


class Search(Protocol):
    """A way to choose."""

    def begin(self, job: Job) -> Chooser:
        """Start on a batch of prompts."""
        ...


@dataclasses.dataclass(frozen=True)
class Greedy:
    """The most probable token at every step; of equally probable ones that with the lowest id."""

    def begin(self, job: Job) -> Chooser:
        from isoform.generation.single import Single

        return Single(job, drafts=1, pick=lambda scores, uniforms, step: _largest(scores), uniforms=None)


def _largest(scores: Float[Tensor, "rows vocab"]) -> Int[Tensor, " rows"]:
    """The first of the largest scores of each row."""
    if scores.device.type == "cpu":  # NumPy's search takes a tenth of the time of PyTorch's
        return torch.from_numpy(scores.numpy().argmax(-1))
    return scores.argmax(-1)


@dataclasses.dataclass(frozen=True)
class Sample:
    """A token drawn from the distribution, tempered, then cut to the ``top_k`` most probable tokens, then
    to the smallest set of most probable ones that holds ``top_p`` (Holtzman et al. 2020).

    The random numbers of a sample depend on the seed and on its own prompt and source, not on the batch it
    is in; the same prompt gives the same text. For several texts ask for ``n``, or change the seed.

    Args:
        temperature: divides the logits; above 0.
        top_k: keep so many tokens (and those equal to the last of them); None: all.
        top_p: keep the most probable tokens up to this mass; None: all.
        seed: of the random numbers.
        n: outputs a prompt, independent of each other, in the order they were drawn in.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    n: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise ConfigError(
                f"Sample: temperature {self.temperature} must be above 0 and finite; at 0 it is Greedy()"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"Sample: top_k {self.top_k} must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"Sample: top_p {self.top_p} must be above 0 and at most 1")
        if self.n < 1:
            raise ConfigError(f"Sample: n {self.n} must be at least 1")
        if self.seed < 0:
            raise ConfigError(f"Sample: seed {self.seed} must not be negative")

    def begin(self, job: Job) -> Chooser:
        import numpy as np

        from isoform.generation.single import Single

        streams = [
            np.random.default_rng([self.seed, draft, key]) for key in job.keys for draft in range(self.n)
        ]
        uniforms = torch.tensor(np.array([stream.random(job.limit) for stream in streams]))
        return Single(job, drafts=self.n, pick=self._pick, uniforms=uniforms)

    def _pick(
        self, scores: Float[Tensor, "rows vocab"], uniforms: Float[Tensor, " rows"] | None, step: int
    ) -> Int[Tensor, " rows"]:
        """Invert the distribution function at one uniform number a row."""
        assert uniforms is not None
        scores = scores / self.temperature
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            smallest = scores.topk(self.top_k, -1).values[:, -1:]
            scores = scores.masked_fill(scores < smallest, -torch.inf)
        order: Tensor | None = None
        weights = scores.double().softmax(-1)
        if self.top_p is not None and self.top_p < 1:
            weights, order = weights.sort(dim=-1, descending=True, stable=True)
            before = weights.cumsum(-1) - weights
            weights = weights.masked_fill(before >= self.top_p, 0.0)
        mass = weights.cumsum(-1)
        # The first place where the mass exceeds u · total: such a place has a positive weight.
        place = (mass <= uniforms[:, None] * mass[:, -1:]).sum(-1, keepdim=True)
        return (place if order is None else order.gather(-1, place))[:, 0]


@dataclasses.dataclass(frozen=True)
class Beam:
    """Beam search: the ``width`` best unfinished outputs go on, the ``width`` best complete ones are kept.

    Candidates of equal score are taken in the order of their beam, then of their id; complete outputs of
    equal score in the order they were completed in. An output cut at the length limit competes with the
    complete ones. With equal settings it chooses what Hugging Face's ``generate`` does.

    Args:
        width: number of beams.
        length_penalty: what a log-probability is divided by for an output of n tokens, EOS included:
            ``"none"`` 1; ``"length"`` n^alpha (Hugging Face's ``length_penalty``); ``"gnmt"``
            ((5 + n)/6)^alpha (Wu et al. 2016).
        alpha: its exponent.
        n_best: how many outputs a sample are returned, at most.
        early_stopping: when a sample is done. ``"when_full"``: as soon as ``width`` outputs are complete
            (Hugging Face: True). ``"heuristic"``: when no beam would beat the worst of them, were it
            complete at its present length (False). ``"never"``: when none could, however long it grew
            (``"never"``). Without a penalty the last two are one rule, and exact.
    """

    width: int
    length_penalty: LengthPenalty = "none"
    alpha: float = 1.0
    n_best: int = 1
    early_stopping: EarlyStopping = "heuristic"

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ConfigError(f"Beam: width {self.width} must be at least 1")
        if not 1 <= self.n_best <= self.width:
            raise ConfigError(f"Beam: n_best {self.n_best} must lie between 1 and width {self.width}")
        if not math.isfinite(self.alpha):
            raise ConfigError(f"Beam: alpha {self.alpha} must be finite")
        for name, value, known in (
            ("length_penalty", self.length_penalty, ("none", "length", "gnmt")),
            ("early_stopping", self.early_stopping, ("when_full", "heuristic", "never")),
        ):
            if value not in known:
                raise ConfigError(f"Beam: {name} {value!r} is unknown{did_you_mean(str(value), known)}")

    def penalty(self, length: int) -> float:
        """What the log-probability of an output of ``length`` tokens is divided by."""
        if self.length_penalty == "none":
            return 1.0
        return (length if self.length_penalty == "length" else (5 + length) / 6) ** self.alpha

    def begin(self, job: Job) -> Chooser:
        from isoform.generation.beams import Beams

        return Beams(job, self)
