"""For models that return a loss: one shift, ignored positions, and an average over tokens (R30)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from isoform.verify.audit.causality import promised
from isoform.verify.audit.report import Check, one_line
from isoform.verify.noise import same
from isoform.verify.subject import Subject, main_tensor
from isoform.verify.watching import tensors

IGNORED = -100
TARGETS = "targets"
"""Labels by this name are the next tokens as a rule, shifted where the data is made; "labels" are not."""
_NO_LABELS = f"forward takes neither labels nor {TARGETS}, so no loss is asked of it"


def check_loss_shift(subject: Subject) -> Check:
    """The loss pairs each output with exactly one next token, and no label reaches its own output."""
    name = "loss-shift"
    labels = _labels(subject)
    if labels is None:
        return Check(name, None, _NO_LABELS)
    before = _shifted_before(subject, labels)
    labels = torch.where(labels == IGNORED, 1, labels)
    shown = "how logits and labels are paired for these inputs"
    rest = "whether the data pipeline shifts them again"
    inputs = _shifting_inputs(subject)
    try:
        loss, logits = _loss(subject, labels, inputs)
    except Exception as error:
        return Check(name, None, f"it gives no loss for these inputs: {one_line(error)}")
    if logits.dim() != 3 or logits.shape[:2] != labels.shape:
        return Check(name, None, f"logits {list(logits.shape)} do not belong to labels {list(labels.shape)}")
    shifts = {s: float(_nll(logits, labels, s)) for s in (0, 1, 2)}
    found = min(shifts, key=lambda s: abs(shifts[s] - loss))
    evidence: dict[str, Any] = {"loss": loss, **{f"nll_at_shift_{s}": v for s, v in shifts.items()}}
    if abs(shifts[found] - loss) > 1e-4 * max(1.0, abs(loss)):
        statement = "the loss is no plain cross entropy of these logits and labels at shift 0, 1 or 2"
        return Check(name, None, statement, evidence)
    evidence["shift_in_loss"] = found
    if inputs is not None:  # the model makes its decoder inputs from the labels, so the shift must be there
        place = _own_label(subject, labels, inputs)
        last = labels.shape[1] - 1
        if not found and place == last and _starts_with_the_last(subject, labels, inputs):
            said = "exactly one shift, in the decoder inputs; the first is the last label (a language)"
            return Check(name, True, said, evidence, shown, rest)
        if found or place is not None:
            seen = (
                f"the output at position {place} changes with the label at position {place}, its own answer"
            )
            twice = f"the decoder inputs are shifted and the loss shifts by {found} again"
            return Check(name, False, seen if place is not None else twice, evidence, shown, rest)
        return Check(name, True, "exactly one shift, in the decoder inputs", evidence, shown, rest)
    if promised(subject)[0] == "causal" and before:
        rest = "whether the data pipeline shifts as these inputs do"
        if found + before == 1:
            said = "exactly one shift, in the labels that were given"
            return Check(name, True, said, evidence, shown, rest)
        said = f"the labels given are the inputs shifted by {before} and the loss shifts by {found} again"
        return Check(name, False, said, evidence, shown, rest)
    aligned = _name(subject) == TARGETS or subject.target.name == "decoder_input_ids"
    if aligned and found == 0 and before is None:
        said = f"no shift: position t is trained on label t, so {_name(subject)} must be the next tokens"
        return Check(
            name, True, said, evidence, shown, "whether the data pipeline shifts them, which it must"
        )
    if promised(subject)[0] != "causal":
        if found == 0:
            return Check(
                name, True, "no shift, as a model that reads both ways has it", evidence, shown, rest
            )
        return Check(
            name, False, f"the loss shifts by {found} though the model reads both ways", evidence, shown, rest
        )
    if found == 1:
        return Check(name, True, "exactly one shift, inside the model", evidence, shown, rest)
    words = {
        0: "to predict its own input token (no shift)",
        2: "to predict the token after the next (two shifts)",
    }
    statement = f"given inputs as labels, each position is trained {words[found]}"
    return Check(name, False, statement, evidence, shown, rest)


def _shifted_before(subject: Subject, labels: Tensor) -> int | None:
    """By how many places the labels that came with the inputs are ahead of them; None: that is not told."""
    if not isinstance(subject.kwargs.get(_name(subject) or ""), Tensor):
        return None
    ids, real = subject.content(subject.target), subject.real(subject.target)
    if ids.shape != labels.shape:
        return None
    fits: list[int] = []
    for shift in range(min(3, labels.shape[1])):
        end = labels.shape[1] - shift
        kept = (labels[:, :end] != IGNORED) & real[:, shift:]
        if bool(kept.any()) and torch.equal(labels[:, :end][kept], ids[:, shift:][kept]):
            fits.append(shift)
    return fits[0] if len(fits) == 1 else None


def _shifting_inputs(subject: Subject) -> dict[str, Any] | None:
    """Inputs without the decoder's own, for models that make them from the labels."""
    if subject.target.name != "decoder_input_ids" or "labels" not in subject.parameters:
        return None
    drop = ("decoder_input_ids", "decoder_attention_mask", "labels")
    inputs = {k: v for k, v in subject.kwargs.items() if k not in drop}
    try:
        subject.run({**inputs, "labels": subject.content(subject.target).contiguous()})
    except Exception:
        return None
    return inputs


def _own_label(subject: Subject, labels: Tensor, inputs: dict[str, Any]) -> int | None:
    """The first position whose output moves with its own label; None where there is none."""
    _, base = _loss(subject, labels, inputs)
    for place in range(labels.shape[1]):
        changed = labels.clone()
        changed[:, place] = (changed[:, place] + 1) % base.shape[-1]
        _, logits = _loss(subject, changed, inputs)
        if not same(logits[:, : place + 1], base[:, : place + 1]):
            return place
    return None


def _starts_with_the_last(subject: Subject, labels: Tensor, inputs: dict[str, Any]) -> bool:
    """Whether the model takes the last label for the first decoder input, and for no other."""
    _, whole = _loss(subject, labels, inputs)
    given = torch.cat([labels[:, -1:], labels[:, :-1]], 1)
    plain = main_tensor(subject.run({**inputs, subject.target.name: given}).result)
    return plain.shape == whole.shape and same(plain, whole)


def check_loss_average(subject: Subject) -> Check:
    """The loss is the sum over supervised tokens divided by their number, not a mean of row means."""
    name = "loss-average"
    labels = _labels(subject)
    if labels is None:
        return Check(name, None, _NO_LABELS)
    if labels.shape[0] < 2 or labels.shape[1] < 4:
        return Check(name, None, "two rows of at least four positions are needed")
    uneven = labels.clone()
    uneven[0, 2:] = IGNORED  # the first row supervises few positions, the others all
    uneven[1:] = torch.where(uneven[1:] == IGNORED, 1, uneven[1:])
    try:
        loss, logits = _loss(subject, uneven)
    except Exception as error:
        return Check(name, None, f"it gives no loss for these inputs: {one_line(error)}")
    if logits.dim() != 3 or logits.shape[:2] != uneven.shape:
        return Check(name, None, f"logits {list(logits.shape)} do not belong to labels {list(uneven.shape)}")
    best: tuple[float, str, int] | None = None
    for shift in (0, 1, 2):
        for how, value in _averages(logits, uneven, shift).items():
            gap = abs(value - loss)
            if best is None or gap < best[0]:
                best = (gap, how, shift)
    assert best is not None
    evidence = {"loss": loss, "nearest": best[1], "gap": best[0]}
    if best[0] > 1e-4 * max(1.0, abs(loss)):
        return Check(name, None, "the loss is none of the averages that are known here", evidence)
    if best[1] != "over supervised tokens":
        return Check(
            name,
            False,
            f"the loss averages {best[1]}; rows with few supervised tokens weigh too much",
            evidence,
        )
    statement = "the loss is the sum over supervised tokens divided by their number"
    return Check(
        name, True, statement, evidence, "one batch", "accumulation over micro-batches in the training loop"
    )


def _averages(logits: Tensor, labels: Tensor, shift: int) -> dict[str, float]:
    losses, keep = _per_token(logits, labels, shift)
    rows = losses.sum(1) / keep.sum(1).clamp(min=1)
    return {
        "over supervised tokens": float(losses.sum() / keep.sum()),
        "over rows (a mean of row means)": float(rows.mean()),
        "over all positions, ignored ones included": float(losses.sum() / keep.numel()),
    }


def _per_token(logits: Tensor, labels: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    logits, labels = logits[:, : labels.shape[1] - shift], labels[:, shift:]
    keep = labels != IGNORED
    losses = F.cross_entropy(
        logits.flatten(0, 1).double(), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return losses.view(labels.shape), keep


def _nll(logits: Tensor, labels: Tensor, shift: int) -> Tensor:
    losses, keep = _per_token(logits, labels, shift)
    return losses.sum() / keep.sum().clamp(min=1)


def _name(subject: Subject) -> str | None:
    return next((name for name in ("labels", TARGETS) if name in subject.parameters), None)


def _labels(subject: Subject) -> Tensor | None:
    """``[B, T]`` labels, `IGNORED` where none counts, whatever negative number says so in the inputs."""
    name = _name(subject)
    if name is None:
        return None
    given = subject.kwargs.get(name)
    if isinstance(given, Tensor):
        return given.masked_fill(given < 0, IGNORED)
    ids = subject.content(subject.target)
    if ids.is_floating_point():
        return None
    return torch.where(subject.real(subject.target), ids, IGNORED)


def _loss(subject: Subject, labels: Tensor, inputs: dict[str, Any] | None = None) -> tuple[float, Tensor]:
    name, given = _name(subject) or "labels", subject.kwargs if inputs is None else inputs
    try:
        result = subject.run({**given, name: labels}).result
    except (RuntimeError, IndexError):
        ignored = labels == IGNORED
        if not bool(ignored.any()):
            raise
        # The other number that is used for what is not supervised.
        result = subject.run({**given, name: labels.masked_fill(ignored, -1)}).result
    scalar = next((x for _, x in tensors(result) if x.dim() == 0), None)
    loss = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", scalar)
    if loss is None:
        raise ValueError("its result holds no loss")
    if loss is result:  # which is all it returns then
        result = subject.run({k: v for k, v in given.items() if k != name}).result
    return float(loss), main_tensor(result)
