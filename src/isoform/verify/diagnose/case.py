"""Two models under examination, and what was found so far."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from isoform.verify.align import Inner, Key, Linear, Model, Site
from isoform.verify.diagnose.constants import Ends, same_constants
from isoform.verify.diagnose.report import Finding, Place
from isoform.verify.diagnose.unary import gap

HINTS = {
    "embedding-scale": "check the factor on token embeddings (√d), and whether it was folded into the table",
    "position-offset": "check where position ids start (0, 1, or after the padding id)",
    "position-padding": "derive positions from the padding mask instead of counting places, or the reverse",
    "sinusoid-layout": "check whether sines and cosines are concatenated or interleaved",
    "rope-pairing": "half or interleaved pairs: change the rotation, or permute the rows of W_q and W_k",
    "rope-frequency": "check theta and the scaling of the rotary frequencies",
    "rope-partial": "check how many channels of a head are rotated, and which",
    "rope-axis": "rotate along time: the axes of heads and time are exchanged",
    "rope-precision": "compute positions, angles, cosines and sines in float32",
    "alibi-slope": "check the slopes, above all for numbers of heads that are no power of two",
    "relative-bias": "check the buckets, their direction, and in which layers the bias is added",
    "attention-scale": "check the factor on the scores",
    "softcap": "check the caps and multipliers on scores, logits and residual branches",
    "qkv-packing": "check how the packed projection is split: thirds, by head, or by group",
    "weight-transpose": "transpose the matrix when it is loaded",
    "kv-head-order": "repeat each key–value head for its group (repeat_interleave), or tile them",
    "head-merge": "bring heads next to their channels before they are merged",
    "bias-missing": "load the bias, or build the projection with the same setting",
    "output-bias": "load the bias of the output head",
    "activation": "use the same activation, down to the approximation",
    "gate-order": "check which half of the gated projection goes through the activation",
    "norm-eps": "set ε to the same value in every norm, inside the root",
    "norm-placement": "check where the norm stands: before the sublayer, after the sum, or both",
    "norm-missing": "check that each norm is there once and has its own weights",
    "norm-offset": "gains are stored as w or as 1 + w: use the same convention",
    "qk-norm": "check the norm on queries and keys: there, along which axis, before or after rotation",
    "parallel-residual": "check whether attention and feed-forward read the same stream or follow each other",
    "expert-routing": "check the order of softmax, top-k and renormalisation, and the scale",
    "mask-polarity": "check what True (or 1) means in the padding mask and how it is broadcast",
    "causality": "apply the causal mask on this path",
    "causal-alignment": "align the causal mask at the end of the keys where queries are fewer",
    "sliding-window": "check the width of the window and which layers have one",
    "cross-mask": "pass the padding mask of the source to cross-attention",
    "document-leak": "keep packed documents apart, and restart their positions",
    "tie-lost": "load this tensor from the checkpoint; tie it where the checkpoint ties it",
    "pooling": "check which positions are pooled when there is padding on either side",
    "masked-row-nan": "keep rows without any allowed key finite",
    "loss-accounting": "check the shift of the labels, ignored positions, and the average",
    "position-decode": "count positions of cached steps from the length of the cache, once for all layers",
    "cache-content": "check what is kept, in which order, and whether it moves with the rows",
    "decode-protocol": "check start, end and padding ids, and rows of the vocabulary that only fill it up",
    "unexplained": "no known deviation explains this part: compare its code in both models line by line",
}


ANYWHERE = ("norm-eps", "norm-offset", "norm-placement", "norm-missing", "bias-missing")
"""What is one cause wherever it is said in the same words."""


@dataclasses.dataclass
class Raw:
    """A deviation at one place."""

    kind: str
    place: Place
    reference: str
    candidate: str
    evidence: dict[str, Any]
    order: int
    hint: str = ""
    exact: bool = False  # nothing in that part is rounded otherwise in the two models


class Case:
    """A reference ``a``, a candidate ``b``, and what was found.

    Attributes:
        rows: for each attention and part, and each feed-forward network, how B's columns stand in A's.
        foreign_entries: B's token lookups that give other vectors than A's, and not a multiple of them.
        biases: for each attention A's and B's biases by part, see `biases.biases`.
        added: for each attention and part what A and B add to the projection behind its product.
    """

    def __init__(self, a: Model, b: Model, tolerance: float = 2e-6) -> None:
        self.a, self.b, self.tolerance = a, b, tolerance
        self.constants = 1e-6  # how well constants agree that are the same
        self._exact = True
        kinds = [k for k in (a.recording.dtype, b.recording.dtype) if k is not None]
        self.stored = max(kinds, key=lambda k: torch.finfo(k).eps, default=torch.float64)
        self.raw: list[Raw] = []
        self.rows: dict[Key, Any] = {}
        self.biases: dict[int, tuple[dict[str, tuple[Tensor, Tensor]], dict[str, tuple[Tensor, Tensor]]]] = {}
        self.added: dict[int, dict[str, tuple[Tensor, Tensor]]] = {}
        self.foreign_entries: set[int] = set()
        self.torn = False  # one of the models has a part more, and the stream is another
        self.checked: list[tuple[str, int, float]] = []
        self.small: list[Any] = []  # pairs of wires that differ, but less than the tolerance

    def round(self, unit: float) -> None:
        """Constants are kept in a coarser dtype, of this precision, in one of the models."""
        self.constants = self.tolerance = unit
        self._exact = False

    @contextlib.contextmanager
    def within(self, ends_a: Ends, ends_b: Ends) -> Generator[None]:
        """Look at one part: where it holds no constants that may be rounded, none of that is to be allowed.

        Args:
            ends_a: where the part ends in A, and the nodes that it starts from.
            ends_b: likewise in B.
        """
        before = self.tolerance, self.constants, self._exact
        if not self._exact and same_constants(self.a, self.b, ends_a, ends_b):
            self.tolerance, self.constants, self._exact = 2e-6, 1e-6, True
        try:
            yield
        finally:
            self.tolerance, self.constants, self._exact = before

    def differ(self, a: Tensor, b: Tensor, role: str) -> float:
        """Largest relative difference at real positions of a stream; both ``[B, T, …]``."""
        if a.shape != b.shape:
            return float("inf")
        real = self.a.real(role)
        if a.shape[:2] == real.shape:
            a, b = a[real], b[real]
        return gap(a, b)

    def add(
        self,
        kind: str,
        place: Place,
        reference: str,
        candidate: str,
        order: int,
        /,
        *,
        hint: str = "",
        **evidence: Any,
    ) -> None:
        """Note a deviation."""
        self.raw.append(Raw(kind, place, reference, candidate, evidence, order, hint, self._exact))

    def place(self, part: str, a: int, b: int) -> Place:
        """A place by the nodes in both models."""
        module_a, source_a = self.a.graph.place(a)
        module_b, source_b = self.b.graph.place(b)
        return Place(part, layer_of(self.a, a), module_a, module_b, source_a, source_b)

    def findings(self, *, latent: bool = False) -> list[Finding]:
        """One finding a cause."""
        groups: dict[tuple[str, str, str, str], list[Raw]] = {}
        for raw in sorted(self.raw, key=lambda r: r.order):
            part = "" if raw.kind in ANYWHERE else raw.place.part
            part = part.removeprefix("self-").removeprefix("cross-").partition(" of expert ")[0]
            part = raw.hint or part  # with a hint of their own the same words are one cause
            groups.setdefault((raw.kind, part, raw.reference, raw.candidate), []).append(raw)
        found: list[Finding] = []
        for (kind, _, reference, candidate), raws in groups.items():
            statement = f"the reference {reference}, the candidate {candidate}"
            where = tuple(dict.fromkeys(r.place for r in raws))
            hint = raws[0].hint or HINTS.get(kind, "")
            found.append(Finding(kind, where, statement, raws[0].evidence, hint, latent))
        return found


def profile(a: Tensor, b: Tensor) -> dict[str, object]:
    """Where two values ``[B, T, d]`` differ: by row, position and channel."""
    error = (a - b).abs() / a.abs().max().clamp(min=1e-30)
    return {
        "by_row": error.amax((1, 2)).tolist(),
        "by_position": error.amax((0, 2)).tolist(),
        "by_channel": error.amax((0, 1))[:64].tolist(),
    }


def layer_of(model: Model, node: int) -> int | None:
    """The layer that a node is in, counted by self-attention within its stack; None before and after all."""
    structure = model.structure
    role = model.role(node)
    own = [s for s in structure.sites if not s.cross and model.role(s.query) == role]
    if not own:
        return None
    starts = [min(p.linear.node for _, p in s.parts()) if s.parts() else s.softmax for s in own]
    ends = [i.out.out for i in structure.inners] + [r.end for r in structure.routers]
    ends += structure.states + [s.out.out for s in structure.sites if s.out is not None]
    ends = [e for e in ends if model.role(e) == role]
    if node > max(ends, default=node):
        post = any(structure.trunk.get(s, s) != s for s in structure.states)
        return len(own) - 1 if post and structure.chain(node)[-1] in structure.states else None
    before = [i for i, start in enumerate(starts) if start <= node]
    reads = [p.linear.read for _, p in own[0].parts()]
    if not before:
        return 0 if node in reads else None
    # What leads up to the next layer's attention (its norm) belongs to that layer.
    following = before[-1] + 1
    if following < len(own) and any(p.linear.read == node for _, p in own[following].parts()):
        return following
    return before[-1]


__all__ = ["HINTS", "Case", "Inner", "Linear", "Raw", "Site", "layer_of", "profile", "torch"]
