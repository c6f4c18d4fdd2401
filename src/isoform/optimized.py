"""Weights in a form that is read faster, with what that costs in quality measured (R28).

Decoding a token reads every weight once, so that its time is the weights' bytes over the memory's bandwidth
unless many rows share the reading. Forms: ``float32`` packed for the backend (the same numbers),
``bfloat16``, ``int8`` weights with one scale an output channel, ``int8_dynamic``, where the inputs of each
product are rounded to 8 bits too, which is the fastest on CPUs and the least exact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from isoform.checkpoints.bundle import Bundle
from isoform.checkpoints.probe import inputs
from isoform.checkpoints.weights import fill, skeleton
from isoform.config.heads import TokenHead
from isoform.errors import ConfigError, DataError, did_you_mean
from isoform.nn.forms import form_of, maps, set_form
from isoform.nn.products import Form
from isoform.tokens import Tokens

if TYPE_CHECKING:
    from isoform.nn import Transformer

TOKENS = 64


@dataclasses.dataclass(frozen=True)
class Quality:
    """What a form changes, on prompts that the plain network continued greedily.

    Both networks read the same prompt and the same continuation, so that one early difference is counted
    once.

    Attributes:
        prompts: how many.
        positions: tokens of the continuations, ends included: what the shares below are of.
        agreement: share of positions where both would choose the same token.
        whole: share of prompts where they do throughout.
        logit_error: mean magnitude of the difference of scores, relative to the scores' standard deviation.
        logit_worst: the largest one, likewise.
        nll: mean negative log-likelihood of the continuations under the plain network, in nats a token …
        nll_after: … and under the other.
        bytes: of all weights before …
        bytes_after: … and after.
    """

    prompts: int
    positions: int
    agreement: float
    whole: float
    logit_error: float
    logit_worst: float
    nll: float
    nll_after: float
    bytes: int
    bytes_after: int

    def lines(self) -> list[str]:
        """The figures in words."""
        return [
            f"greedy tokens agree at {self.agreement:.2%} of {self.positions} positions, "
            f"throughout in {self.whole:.1%} of {self.prompts} prompts",
            f"scores differ by {self.logit_error:.2%} of their spread in the mean, "
            f"{self.logit_worst:.2%} at worst",
            f"NLL a token {self.nll:.4f} → {self.nll_after:.4f}",
            f"weights {self.bytes / 2**20:.1f} → {self.bytes_after / 2**20:.1f} MiB",
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with stable keys."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Task:
    """A metric of what both networks write, each on its own.

    Attributes:
        metric: its name.
        before: of the plain network …
        after: … and of the other.
        p_value: how often a difference at least as large would be seen if there were none (Koehn 2004).
        count: how many outputs, or what else the metric counts.
        signature: what was counted and how.
    """

    metric: str
    before: float
    after: float
    p_value: float
    count: int
    signature: str

    def line(self) -> str:
        """The figures in words."""
        change = f"{self.metric} {self.before:.4g} → {self.after:.4g}"
        return f"{change} over {self.count} (p {self.p_value:.2f}, {self.signature})"


def optimize(
    bundle: Bundle,
    *,
    weights: Form = "float32",
    keep: Sequence[str] = (),
    texts: Sequence[str] | None = None,
    references: Sequence[str] | None = None,
    metric: str = "exact_match",
    max_new_tokens: int = TOKENS,
) -> Bundle:
    """A bundle for inference whose weights are in another form; the given one is left as it is.

    It is saved and loaded like any other; ``float32`` is a matter of the process and is saved plain. What
    was measured stands in ``provenance["optimized"]``.

    Args:
        bundle: plain weights.
        weights: the form.
        keep: names of maps that stay float32, e.g. ``("head",)``, ``*`` for any run of characters: the
            rounding of the last map goes into the scores undamped.
        texts: prompts or sources to measure the loss of quality on; default: fixed random ids, on which a
            trained network is less sure of itself than on text.
        references: what each of the texts should give; then both networks write it too, and ``metric`` says
            how near they come.
        metric: one of `isoform.evaluation.run.GENERATED`.
        max_new_tokens: the longest continuation that choices are compared on; shorter where learned positions
            end.

    Raises:
        ConfigError: an unknown form or metric, a bundle that has one already, a name in ``keep`` that no map
            has, or references without texts.
        DataError: not as many references as texts.
    """
    if references is not None:
        _check_task(texts, references, metric)
    model = skeleton(bundle.config)
    fill(model, ((name, p.detach()) for name, p in bundle.model.named_parameters()))
    set_form(model, weights, keep)
    made = dataclasses.replace(bundle, model=model, report=None)
    noted: dict[str, Any] = {"weights": weights, "keep": list(keep)}
    if isinstance(bundle.config.head, TokenHead) and bundle.config.decoder is not None:
        noted["quality"] = quality(bundle, made, texts=texts, max_new_tokens=max_new_tokens).to_dict()
        if texts is not None and references is not None:
            noted["task"] = dataclasses.asdict(task(bundle, made, texts, references, metric))
    return dataclasses.replace(made, provenance={**bundle.provenance, "optimized": noted})


def quality(
    reference: Bundle, other: Bundle, *, texts: Sequence[str] | None = None, max_new_tokens: int = TOKENS
) -> Quality:
    """Hold a bundle against the one it was made from; see `Quality`."""
    from isoform.generation.generate import generate
    from isoform.generation.texts import TextGenerator

    if texts is None:
        tokens, source = inputs(reference.config)
        places = reference.config.embedding.positions
        longest = int(tokens.lengths().max())
        room = places.max_positions - longest + 1 if places.kind == "learned" else max_new_tokens
        batches = [(tokens, source, room)]
    else:
        batches = TextGenerator(reference).read(texts)
    counts = torch.zeros(4, dtype=torch.float64)
    prompts = whole = positions = 0
    worst = spread = 0.0
    for tokens, source, limit in batches:
        most, protocol = min(limit, max_new_tokens), reference.protocol
        found = generate(reference.model, tokens, source=source, max_new_tokens=most, protocol=protocol)
        full, where, chosen = _joined(tokens, found.ids, found.finished, reference)
        before, after = (_scores(b.model, full, source, where) for b in (reference, other))
        same = before.argmax(-1) == after.argmax(-1)
        error = (before - after).abs()
        nll = [-s.log_softmax(-1).gather(-1, chosen[:, None]).sum() for s in (before, after)]
        counts += torch.stack([same.sum(), error.mean(-1).sum(), *nll]).double()
        worst, spread = max(worst, float(error.max())), spread + float(before.std(-1).sum())
        positions += len(chosen)
        for row in range(tokens.batch):
            prompts, whole = prompts + 1, whole + bool(same[where[0] == row].all())
    agreement, error, nll_before, nll_after = (counts / positions).tolist()
    spread /= positions
    return Quality(
        prompts,
        positions,
        agreement,
        whole / prompts,
        error / spread,
        worst / spread,
        nll_before,
        nll_after,
        weight_bytes(reference.model),
        weight_bytes(other.model),
    )


def task(
    reference: Bundle, other: Bundle, texts: Sequence[str], references: Sequence[str], metric: str
) -> Task:
    """Score what two bundles write for texts; see `Task`."""
    from isoform.evaluation import Bootstrap, paired
    from isoform.evaluation.run import GENERATED
    from isoform.generation.texts import generate_texts

    first, second = (GENERATED[metric](generate_texts(b, texts), references) for b in (reference, other))
    found = paired(first, second, Bootstrap())
    before = found.first
    return Task(metric, before.value, found.second.value, found.p_value, before.count, before.signature)


def _check_task(texts: Sequence[str] | None, references: Sequence[str], metric: str) -> None:
    from isoform.evaluation.run import GENERATED

    if metric not in GENERATED:
        raise ConfigError(f"metric: {metric!r} is of no texts{did_you_mean(metric, GENERATED)}")
    if texts is None:
        raise ConfigError("references: there are no texts that they are of")
    if len(texts) != len(references):
        raise DataError(f"{len(texts)} texts but {len(references)} references: each text needs one")


def weight_bytes(model: Transformer) -> int:
    """Bytes of all weights as a step reads them: of a copy packed for the backend and its origin, one."""
    held = sum(p.numel() * p.element_size() for p in model.parameters() if not p.is_meta)
    if form_of(model) in (None, "float32"):
        return held
    made = [m.product.stored() for _, m in maps(model) if m.product is not None]
    return held + sum(t.numel() * t.element_size() for stored in made for t in stored.values())


def _joined(
    tokens: Tokens, ids: list[list[int]], finished: list[bool], bundle: Bundle
) -> tuple[Tokens, tuple[Tensor, Tensor], Tensor]:
    """Prompts with their continuations; the (row, column) places that these were chosen at, and what was."""
    ends = bundle.protocol.eos_ids[:1]
    new = [[*row, *ends] if done else row for row, done in zip(ids, finished, strict=True)]
    prompts = tokens.rows()
    whole = [p + n[:-1] for p, n in zip(prompts, new, strict=True)]
    full = dataclasses.replace(
        Tokens.from_lists(whole, pad_id=bundle.protocol.pad_id, device=tokens.device), prefix=tokens.prefix
    )
    rows = torch.tensor([i for i, n in enumerate(new) for _ in n])
    columns = torch.tensor([len(p) - 1 + j for p, n in zip(prompts, new, strict=True) for j in range(len(n))])
    chosen = torch.tensor([t for n in new for t in n])
    device = tokens.device
    return full, (rows.to(device), columns.to(device)), chosen.to(device)


@torch.inference_mode()
def _scores(model: Transformer, full: Tokens, source: Tokens | None, where: tuple[Tensor, Tensor]) -> Tensor:
    memory = None if source is None else model.encode(source)
    hidden = model.hidden(full, memory=memory)
    assert model.head is not None
    return model.head(hidden[where]).float()
