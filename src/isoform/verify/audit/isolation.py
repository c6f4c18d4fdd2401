"""Does anything read what it must not: padding, documents, beyond the window, other rows? (R21, R41)"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isoform.tokens import Tokens
from isoform.verify.audit.causality import Promise, judge, promised
from isoform.verify.audit.report import Check, one_line
from isoform.verify.noise import largest_difference, tolerance
from isoform.verify.subject import Subject


def check_prefix(subject: Subject, promise: Promise | None, *, seed: int = 0) -> Check:
    """The condition reads all of itself; the rest reads nothing after it (6.33)."""
    value = subject.kwargs.get(subject.target.name)
    if not isinstance(value, Tokens) or value.prefix is None:
        return Check("prefix", None, "no prefix length goes with the input (Tokens.prefix)")
    if (promise or promised(subject)[0]) != "prefix":
        return Check("prefix", None, "does not promise the prefix rule")
    places, prefix = value.places(), value.prefix[:, None]

    def forbidden(key: int) -> Tensor:
        at = places[:, key : key + 1]
        return (places < at) & ~((places < prefix) & (at < prefix)) & value.real_or_ones()

    return judge("prefix", subject, forbidden, "prefix", "Tokens.prefix", seed)


def check_documents(subject: Subject, *, seed: int = 0) -> Check:
    """Packed documents do not see each other."""
    value = subject.kwargs.get(subject.target.name)
    if not isinstance(value, Tokens) or value.documents is None:
        return Check("documents", None, "no document numbers go with the input (Tokens.documents)")
    documents = value.documents

    def forbidden(key: int) -> Tensor:
        return documents != documents[:, key : key + 1]

    return judge("documents", subject, forbidden, "causal", "Tokens.documents", seed)


def check_window(subject: Subject, *, seed: int = 0) -> Check:
    """After ℓ layers nothing farther than ℓ·(window - 1) positions back has been read."""
    windows = _windows(subject.module)
    length = subject.content(subject.target).shape[1]
    if windows is None or all(w is None for w in windows):
        return Check("window", None, "no window is configured")
    reach = 0
    for w in windows:
        reach = length if w is None else reach + w - 1
    if reach >= length - 1:
        return Check(
            "window",
            None,
            f"the input ({length} positions) is not longer than the reach of all windows ({reach})",
        )
    batch = subject.content(subject.target).shape[0]
    total = reach

    def forbidden(key: int) -> Tensor:
        return (torch.arange(length) > key + total).expand(batch, -1)

    return judge("window", subject, forbidden, "causal", f"windows {windows}", seed)


def _windows(module: Any) -> list[int | None] | None:
    config = getattr(module, "config", None)
    stack = getattr(config, "decoder", None) or getattr(config, "encoder", None)
    listed: Any = getattr(stack, "layers", None)
    if callable(listed):
        layers_of: Any = listed()
        return [layer.attention.window for layer in layers_of]
    window, layers = getattr(config, "sliding_window", None), getattr(config, "num_hidden_layers", None)
    if not isinstance(window, int) or not isinstance(layers, int):
        return None
    if getattr(config, "use_sliding_window", True) is False:
        return None
    types: Any = getattr(config, "layer_types", None)
    if types:
        return [window if kind == "sliding_attention" else None for kind in types]
    return [window for _ in range(layers)]


def check_batch_independence(subject: Subject) -> Check:
    """Each row gives the same alone, and in another order."""
    name, batch = "batch-independence", subject.content(subject.target).shape[0]
    if batch < 2:
        return Check(name, None, "the batch has one row; at least two are needed")
    base = subject.run().output
    order = torch.arange(batch - 1, -1, -1)
    for rows, what in [
        (order, "in reverse order"),
        *[(torch.tensor([b]), f"row {b} alone") for b in range(min(batch, 4))],
    ]:
        try:
            other = subject.run(subject.rows(rows)).output
        except (RuntimeError, ValueError, IndexError) as error:
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
                f"{what}: the output moves by {gap:.3g}; rows of a batch read each other",
                {"size": gap},
            )
    return Check(name, True, f"{batch} rows give the same alone and in reverse order", {"rows": batch})
