"""Does anything read what it must not: padding, documents, beyond the window, other rows? (R21, R41)"""

from __future__ import annotations

import torch
from torch import Tensor

from isoform.tokens import Tokens
from isoform.verify.audit.causality import Promise, judge, promised
from isoform.verify.audit.report import Check, one_line
from isoform.verify.noise import largest_difference, tolerance
from isoform.verify.streams import DOCUMENTS, PREFIXES
from isoform.verify.subject import Run, Subject


def check_prefix(subject: Subject, promise: Promise | None, *, seed: int = 0) -> Check:
    """The condition reads all of itself; the rest reads nothing after it (6.33)."""
    prefix = subject.prefix()
    if prefix is None:
        return Check("prefix", None, f"no prefix length goes with the input (Tokens.prefix, {PREFIXES[0]})")
    if (promise or promised(subject)[0]) != "prefix":
        return Check("prefix", None, "does not promise the prefix rule")
    value, real = subject.kwargs.get(subject.target.name), subject.real(subject.target)
    places = value.places() if isinstance(value, Tokens) else torch.arange(real.shape[1]).expand_as(real)
    prefix = prefix[:, None]

    def forbidden(key: int) -> Tensor:
        at = places[:, key : key + 1]
        return (places < at) & ~((places < prefix) & (at < prefix)) & real

    return judge("prefix", subject, forbidden, "prefix", "the prefix lengths", seed)


def check_documents(subject: Subject, *, seed: int = 0) -> Check:
    """Packed documents do not see each other."""
    documents = subject.documents()
    if documents is None:
        why = f"no document numbers go with the input (Tokens.documents, {DOCUMENTS[0]})"
        return Check("documents", None, why)

    real = subject.real(subject.target)

    def forbidden(key: int) -> Tensor:
        return (documents != documents[:, key : key + 1]) & real

    return judge("documents", subject, forbidden, "causal", "the document numbers", seed)


def _first(subject: Subject, run: Run, again: Run, rows: Tensor) -> str:
    """Where rows of a batch first give something else than in another batch, in words."""
    length = subject.content(subject.target).shape[1]
    real = subject.real(subject.target)[rows]
    whole = subject.timed(run, len(subject.real(subject.target)), length)
    for a, b in zip(whole, subject.timed(again, len(rows), length), strict=False):
        want = a.value[rows]
        if a.path != b.path or want.shape != b.value.shape:
            continue
        gap = (want - b.value).abs().flatten(2).amax(-1).masked_fill(~real, 0.0)
        if float(gap.max()) > tolerance(want):
            row, place = divmod(int(gap.argmax()), length)
            return f", first at {a.path} (row {int(rows[row])}, position {place}: {float(gap.max()):.3g})"
    return ""


def check_batch_independence(subject: Subject) -> Check:
    """Each row gives the same alone, and in another order."""
    name, batch = "batch-independence", subject.content(subject.target).shape[0]
    if batch < 2:
        return Check(name, None, "the batch has one row; at least two are needed")
    run = subject.run()
    base = run.output
    order = torch.arange(batch - 1, -1, -1)
    for rows, what in [
        (order, "in reverse order"),
        *[(torch.tensor([b]), f"row {b} alone") for b in range(min(batch, 4))],
    ]:
        try:
            again = subject.run(subject.rows(rows))
            other = again.output
        except Exception as error:
            return Check(name, False, f"it cannot be run with {what}: {one_line(error)}")
        want = base[rows]
        if other.shape != want.shape:
            return Check(
                name, False, f"{what}: the output has shape {list(other.shape)}, expected {list(want.shape)}"
            )
        gap = largest_difference(subject.at_real(other, rows), subject.at_real(want, rows))
        if gap > tolerance(want):
            return Check(
                name,
                False,
                f"{what}: the output moves by {gap:.3g}{_first(subject, run, again, rows)}; rows of a batch "
                "read each other",
                {"size": gap},
            )
    return Check(name, True, f"{batch} rows give the same alone and in reverse order", {"rows": batch})
