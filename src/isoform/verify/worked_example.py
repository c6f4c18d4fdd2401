"""The chapter's two-position layer (6.37–6.50), run by this library's own network, step by step (R29).

The network is an ordinary configuration with the chapter's weights; every value shown is an intermediate that
the forward pass tapped. Nothing is computed a second time; only softmax and loss are added after the head.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from isoform import config as c
from isoform.config.base import parse
from isoform.errors import ConfigError
from isoform.nn import Transformer, build, capture
from isoform.tokens import Tokens

Visibility = Literal["causal", "bidirectional", "prefix"]
Placement = Literal["pre", "post"]
NormKind = Literal["layer", "rms"]

X = [[1.0, 3.0], [4.0, 2.0]]  # (6.37), embedding and position included
W_1 = [[1.0, 0.0, 1.0], [0.0, 1.0, -1.0]]  # (6.38), y = x W
W_2 = [[1.0, 0.0], [0.0, 1.0], [1.0, -1.0]]
W_OUT = [[1.0, 0.0, -1.0], [0.0, 1.0, 1.0]]  # (6.39)
VOCABULARY = ("A", "B", "C")
TARGETS = ("B", "A")  # (6.50)


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One line of the chain.

    Args:
        name: as in the chapter's recomputed numbers: ``norm1``, ``scores``, ``attention_weights`` …
        equation: number of the equation it instantiates.
        formula: that equation in one line.
        value: float64; ``[positions, channels]``, scores and weights ``[queries, keys]``, the loss a scalar.
    """

    name: str
    equation: str
    formula: str
    value: Float[Tensor, "..."]


@dataclasses.dataclass(frozen=True, eq=False)
class WorkedExample:
    """One run of the example, and its settings."""

    visibility: Visibility
    prefix: int | None
    placement: Placement
    norm: NormKind
    eps: float
    allowed: list[list[bool]]
    """Who may read whom: queries downwards, keys across."""
    steps: tuple[Step, ...]

    def __getitem__(self, name: str) -> Tensor:
        """The value of a step, by name."""
        return next(step.value for step in self.steps if step.name == name)

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood of the targets B, A (6.50)."""
        return self["loss_targets_B_A"].item()

    def to_dict(self) -> dict[str, Any]:
        """``settings``, ``allowed`` and ``steps`` as plain data."""
        return {
            "settings": {
                "visibility": self.visibility,
                "prefix": self.prefix,
                "placement": self.placement,
                "norm": self.norm,
                "eps": self.eps,
            },
            "inputs": {
                "X": X, "W_Q=W_K=W_V=W_O": [[1.0, 0.0], [0.0, 1.0]], "W_1": W_1, "W_2": W_2, "W_out": W_OUT,
                "vocabulary": list(VOCABULARY), "targets": list(TARGETS),
            },
            "allowed": self.allowed,
            "steps": [
                {"name": s.name, "equation": s.equation, "formula": s.formula, "value": s.value.tolist()}
                for s in self.steps
            ],
        }  # fmt: skip


def worked_example(
    *,
    visibility: Visibility = "causal",
    placement: Placement = "pre",
    norm: NormKind = "layer",
    eps: float = 0.0,
    prefix: int = 1,
) -> WorkedExample:
    """Run the example.

    Args:
        visibility: who may read whom (6.32–6.33).
        placement: Pre-LN as in the chapter, with a final norm; or Post-LN (6.20), without one.
        norm: LayerNorm (6.14) or RMSNorm (6.18).
        eps: inside the root; the chapter's numbers have 0 (R5).
        prefix: how many of the two positions form the condition; read by visibility "prefix" only.

    Raises:
        ConfigError: a setting that does not exist, a negative eps, a prefix outside 0 … 2.
    """
    if visibility == "prefix" and not 0 <= prefix <= len(X):
        raise ConfigError(f"prefix {prefix}: the worked example has {len(X)} positions")
    if not 0 <= eps < math.inf:
        raise ConfigError(f"eps {eps:g}: expected a finite number that is not negative")
    model = network(visibility=visibility, placement=placement, norm=norm, eps=eps)
    condition = torch.tensor([prefix]) if visibility == "prefix" else None
    tokens = Tokens(torch.tensor([[0, 1]]), prefix=condition)
    with torch.no_grad(), capture(model, "*") as seen:
        model(tokens)
    targets = torch.tensor([VOCABULARY.index(target) for target in TARGETS])
    logits = seen["head.logits"][0]
    steps = [
        Step(name, equation, formula, _plane(seen[path]))
        for name, equation, formula, path in _chain(placement, "LN" if norm == "layer" else "RMS")
    ]
    steps += [
        Step("probabilities", "6.49", "P = softmax(Z) by row", logits.softmax(-1)),
        Step(
            "loss_targets_B_A", "6.50", "L = -½ [log P(1, B) + log P(2, A)]", F.cross_entropy(logits, targets)
        ),
    ]
    reads = seen["decoder.layers.0.attention.body.weights"][0, 0] > 0
    return WorkedExample(
        visibility,
        prefix if visibility == "prefix" else None,
        placement,
        norm,
        eps,
        reads.tolist(),
        tuple(steps),
    )


@dataclasses.dataclass(frozen=True)
class Contrast:
    """What tells two visibilities of the example apart, and what does not (exercise 6.9)."""

    against: Visibility
    residual1: tuple[float, float]
    """Largest difference at each position behind the attention."""
    loss: float
    """Difference of the losses."""


def contrast(example: WorkedExample) -> Contrast:
    """Hold a run against the same layer under the other visibility: causal where everything may be read."""
    other: Visibility = "causal" if all(map(all, example.allowed)) else "bidirectional"
    second = worked_example(visibility=other, placement=example.placement, norm=example.norm, eps=example.eps)
    first, last = (example["residual1"] - second["residual1"]).abs().amax(-1).tolist()
    return Contrast(other, (first, last), abs(example.loss - second.loss))


def network(*, visibility: Visibility, placement: Placement, norm: NormKind, eps: float) -> Transformer:
    """The example as an Isoform network in float64: d 2, one head, feed-forward width 3, vocabulary A B C."""
    model = build(
        architecture(visibility=visibility, placement=placement, norm=norm, eps=eps), seed=0
    ).double()
    weights = model.state_dict()
    rows = torch.tensor([*X, [0.0, 0.0]], dtype=torch.float64)  # C is never read
    identity = torch.eye(2, dtype=torch.float64)
    layer = "decoder.layers.0"
    for name, value in {
        "embedding.weight": rows,
        f"{layer}.attention.body.qkv.weight": identity.repeat(3, 1),
        f"{layer}.attention.body.output.weight": identity,
        # The chapter writes y = x W; a linear layer stores the transpose.
        f"{layer}.feed_forward.body.up.weight": torch.tensor(W_1, dtype=torch.float64).T,
        f"{layer}.feed_forward.body.down.weight": torch.tensor(W_2, dtype=torch.float64).T,
        "head.weight": torch.tensor(W_OUT, dtype=torch.float64).T,
    }.items():
        weights[name].copy_(value)
    return model.eval()


def architecture(
    *, visibility: Visibility, placement: Placement, norm: NormKind, eps: float
) -> c.ModelConfig:
    """The example's configuration."""
    unit = {"kind": norm, "eps": eps, "bias": norm == "layer"}
    none = {"kind": "none"}
    return parse(
        c.ModelConfig,
        {
            "zero_eps": eps == 0,
            "d_model": 2,
            "embedding": {
                "vocabulary": "worked-example",
                "vocab_size": len(VOCABULARY),
                "width": 2,
                "positions": none,
            },
            "decoder": {
                "n_layers": 1,
                "visibility": visibility,
                "layer": {
                    "placement": placement,
                    "residual": "sequential",
                    "norm": unit,
                    "attention": {
                        "n_heads": 1,
                        "n_kv_heads": 1,
                        "head_width": 2,
                        "scale": "inverse_sqrt_head_width",
                        "bias": {"query": True, "key": True, "value": True, "output": True},
                        "positions": none,
                    },
                    "feed_forward": {
                        "kind": "two_layer",
                        "width": 3,
                        "activation": "relu",
                        "bias_up": True,
                        "bias_down": True,
                    },
                },
                "final_norm": unit if placement == "pre" else None,
            },
            "head": {"kind": "tokens", "tied": False, "bias": True},
        },
        where="worked example",
    )


def _chain(placement: Placement, n: str) -> list[tuple[str, str, str, str]]:
    """Name, equation, formula and tapped intermediate of every step, in order of computation."""
    attention, feed_forward = "decoder.layers.0.attention", "decoder.layers.0.feed_forward"
    pre = placement == "pre"
    x = "X̂" if pre else "X"
    u = f"{n}(U)" if pre else "Û"
    reading = [
        ("scores", "6.41", f"S = Q Kᵀ / √2, Q = K = V = {x}", f"{attention}.body.scores"),
        (
            "attention_weights",
            "6.41",
            "A = softmax(S) over the keys that may be read",
            f"{attention}.body.weights",
        ),
        ("attention_output", "6.42", "O = A V", f"{attention}.increment"),
    ]
    network = [
        ("ffn_preactivation", "6.44", f"{u} W₁", f"{feed_forward}.body.preactivation"),
        ("ffn_hidden", "6.45", f"ReLU({u} W₁)", f"{feed_forward}.body.hidden"),
        ("ffn_output", "6.46", f"F = ReLU({u} W₁) W₂", f"{feed_forward}.increment"),
    ]
    start = [("input", "6.37", "X, embedding and position included", "embedding.output")]
    if pre:
        return [
            *start,
            ("norm1", "6.40", f"X̂ = {n}(X)", f"{attention}.normalised"),
            *reading,
            ("residual1", "6.42", "U = X + O", f"{attention}.sum"),
            ("norm2", "6.43", f"{n}(U)", f"{feed_forward}.normalised"),
            *network,
            ("residual2", "6.47", "H = U + F", f"{feed_forward}.sum"),
            ("final_norm", "6.48", f"H̄ = {n}(H)", "decoder.output"),
            ("logits", "6.48", "Z = H̄ W_out", "head.logits"),
        ]
    return [
        *start,
        *reading,
        ("residual1", "6.20", "U = X + O", f"{attention}.sum"),
        ("norm1", "6.20", f"Û = {n}(X + O)", f"{attention}.output"),
        *network,
        ("residual2", "6.20", "H = Û + F", f"{feed_forward}.sum"),
        ("norm2", "6.20", f"Ĥ = {n}(Û + F)", f"{feed_forward}.output"),
        ("logits", "6.48", "Z = Ĥ W_out", "head.logits"),
    ]


def _plane(value: Tensor) -> Tensor:
    """Without the batch axis, and without the head axis where there is one: both are 1."""
    return value.reshape(value.shape[-2:])
