"""How two models turn the same logits into a loss: shift, ignored positions, average, smoothing (R30).

Each model's loss is explained from its own logits, on batches of unequal padding, so that a fault in the
network does not matter here.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isoform.verify.diagnose.case import HINTS
from isoform.verify.diagnose.report import Finding, Place
from isoform.verify.diagnose.unary import gap
from isoform.verify.subject import Inputs, Subject, main_tensor, mode

IGNORED = -100
CLOSE = 2e-5


def check(first: nn.Module, second: nn.Module, inputs: Inputs, other: Inputs) -> Finding | None:
    """A finding where both models give a loss for labels and account for it differently."""
    found = [_observed(m, i) for m, i in ((first, inputs), (second, other))]
    one, two = found
    if one is None or two is None or len(one) != len(two):
        return None
    if all(_near(a[0], b[0]) for a, b in zip(one, two, strict=True)):
        return None
    forms_a, forms_b = _explained(one), _explained(two)
    if set(forms_a) & set(forms_b):
        return None  # the logits differ, their accounting does not
    if not forms_a and not forms_b and not _same_logits(one, two):
        return None
    if (not forms_a or not forms_b) and not _same_logits(one, two):
        return None
    unknown = "computes the loss in a way of its own"
    words = [next(iter(forms), unknown) for forms in (forms_a, forms_b)]
    place = Place("loss", None, type(first).__name__, type(second).__name__, "", "")
    return Finding(
        "loss-accounting",
        (place,),
        f"the reference {words[0]}, the candidate {words[1]}",
        {"reference": [v for v, *_ in one], "candidate": [v for v, *_ in two]},
        HINTS["loss-accounting"],
    )


Observed = list[tuple[float, Tensor, Tensor]]


def _observed(module: nn.Module, inputs: Inputs) -> Observed | None:
    """Loss, logits and labels of batches with more and less padding; None: it gives no loss."""
    subject = Subject(module, inputs)
    if "labels" not in subject.parameters:
        return None
    ids = subject.content(subject.target)
    given = subject.kwargs.get("labels")
    if ids.is_floating_point() and not isinstance(given, Tensor):
        return None
    labels = given if isinstance(given, Tensor) else torch.where(subject.real(subject.target), ids, IGNORED)
    if labels.dim() != 2 or labels.shape[0] < 2 or labels.shape[1] < 6:
        return None
    found: Observed = []
    try:
        with mode(module, training=False):
            for batch in _batches(labels):
                result = subject.run({**subject.kwargs, "labels": batch}).result
                loss = result["loss"] if isinstance(result, dict) else result.loss
                logits = main_tensor(result)
                if logits.dim() != 3 or logits.shape[:2] != batch.shape or logits.dtype.itemsize < 4:
                    return None
                found.append((float(loss), logits.double(), batch))
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError):
        return None
    return found


def _batches(labels: Tensor) -> Iterator[Tensor]:
    yield labels
    uneven = labels.clone()
    uneven[0, 3:] = IGNORED
    yield uneven
    late = labels.clone()
    late[-1, :-3] = IGNORED
    yield torch.where((late != IGNORED).any(1, keepdim=True), late, labels)


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= CLOSE * max(1.0, abs(a))


def _same_logits(one: Observed, two: Observed) -> bool:
    return all(a.shape == b.shape and gap(a, b) < 1e-4 for (_, a, _), (_, b, _) in zip(one, two, strict=True))


def _explained(batches: Observed) -> list[str]:
    """All accountings that give the losses of all batches."""
    forms = [_forms(logits, labels) for _, logits, labels in batches]
    plain = [
        name
        for name in forms[0]
        if all(_near(loss, f[name][0]) for (loss, *_), f in zip(batches, forms, strict=True))
    ]
    if plain:
        return plain
    smoothed: list[str] = []
    for name in forms[0]:
        for number, kind in ((1, "supervised tokens"), (2, "all positions, ignored ones too")):
            nll, uniform = forms[0][name][0], forms[0][name][number]
            share = (batches[0][0] - nll) / (uniform - nll) if uniform != nll else 0.0
            fits = 1e-4 < share < 0.9 and all(
                _near(loss, (1 - share) * f[name][0] + share * f[name][number])
                for (loss, *_), f in zip(batches, forms, strict=True)
            )
            if fits:
                smoothed.append(f"{name}, smoothed by {share:.4g} over {kind}")
    if smoothed:
        return smoothed
    dropped: list[str] = []
    for token in batches[0][2].unique().tolist():
        if token == IGNORED or len(batches[0][2].unique()) > 200:
            continue
        less = [_forms(x, torch.where(y == token, IGNORED, y)) for _, x, y in batches]
        dropped += [
            f"{name}, leaving out label {token}"
            for name in less[0]
            if all(_near(loss, f[name][0]) for (loss, *_), f in zip(batches, less, strict=True))
        ]
    return dropped


def _forms(logits: Tensor, labels: Tensor) -> dict[str, tuple[float, float, float]]:
    """For each accounting the cross entropy, and the smoothing term over supervised and all positions."""
    found: dict[str, tuple[float, float, float]] = {}
    shifts = {
        0: "compares each position with the label at the same place",
        1: "compares each position with the next label",
        2: "compares each position with the label after the next",
    }
    for shift, what in shifts.items():
        x, y = logits[:, : labels.shape[1] - shift], labels[:, shift:]
        keep = (y != IGNORED).double()
        losses = (
            F.cross_entropy(x.flatten(0, 1), y.flatten().clamp(min=0), reduction="none").view(y.shape) * keep
        )
        uniform = -x.log_softmax(-1).mean(-1)
        count, rows = keep.sum(), keep.sum(1).clamp(min=1)
        if not float(count):
            continue
        for how, scale in {
            "and averages over tokens": lambda t: t.sum() / count,  # noqa: B023
            "and averages over rows": lambda t: (t.sum(1) / rows).mean(),  # noqa: B023
            "and averages over all positions, ignored ones too": lambda t: t.mean(),
            "and adds up": lambda t: t.sum(),
            "and divides by the rows": lambda t: t.sum() / len(t),
        }.items():
            found[f"{what} {how}"] = (
                float(scale(losses)),
                float(scale(uniform * keep)),
                float(scale(uniform)),
            )
    return found
