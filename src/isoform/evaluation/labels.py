"""How well labels and tags are predicted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from isoform.errors import DataError
from isoform.evaluation.score import Counted, Floats, ratio

Span = tuple[int, int, str]


def accuracy(predicted: Sequence[str], gold: Sequence[str]) -> Counted:
    """Share of labels that are right."""
    _same(predicted, gold)
    rows = [(float(p == g), 1.0) for p, g in zip(predicted, gold, strict=True)]
    return Counted("accuracy", np.array(rows).reshape(-1, 2), ratio, f"labels:{len(set(gold))}", "more")


def tag_accuracy(predicted: Sequence[Sequence[str]], gold: Sequence[Sequence[str]]) -> Counted:
    """Share of words whose tag is right; resampled by sentence."""
    _same(predicted, gold)
    rows = [
        (float(sum(p == g for p, g in zip(mine, other, strict=True))), float(len(other)))
        for mine, other in zip(predicted, gold, strict=True)
    ]
    table = np.array(rows).reshape(-1, 2)
    return Counted("accuracy", table, ratio, "unit:words", "more", size=lambda sums: int(sums[1]))


def macro_f1(predicted: Sequence[str], gold: Sequence[str]) -> Counted:
    """Mean over classes of the harmonic mean of precision and recall, 0 where both are 0.

    The classes are those that occur, predicted or true (as in scikit-learn).
    """
    _same(predicted, gold)
    classes = sorted({*gold, *predicted})
    number = {label: i for i, label in enumerate(classes)}
    counts = np.zeros((len(gold), 3, len(classes)))  # hits, predictions, gold
    for i, (p, g) in enumerate(zip(predicted, gold, strict=True)):
        counts[i, 2, number[g]] = counts[i, 1, number[p]] = 1
        counts[i, 0, number[p]] = float(p == g)

    def each(sums: Floats) -> Floats:
        hits, guesses, real = np.moveaxis(sums.reshape(*sums.shape[:-1], 3, -1), -2, 0)
        return 2 * hits / np.maximum(guesses + real, 1)

    return Counted(
        "macro_f1",
        counts.reshape(len(gold), -1),
        lambda sums: each(sums).mean(-1),
        f"classes:{len(classes)}|average:macro|zero_division:0",
        "more",
        parts=lambda sums: dict(zip(classes, each(sums).tolist(), strict=True)),
    )


def span_f1(predicted: Sequence[Sequence[str]], gold: Sequence[Sequence[str]]) -> Counted:
    """F1 over exact spans of BIO tags, as in the CoNLL-2000 evaluation (Tjong Kim Sang & Buchholz 2000).

    Args:
        predicted: tags of each sentence, ``B-x``, ``I-x`` or ``O``.
        gold: the true ones.
    """
    _same(predicted, gold)
    rows: list[tuple[int, int, int]] = []
    for mine, other in zip(predicted, gold, strict=True):
        found, real = spans(mine), spans(other)
        rows.append((len(found & real), len(found), len(real)))
    table = np.array(rows, dtype=np.float64).reshape(-1, 3)

    def f1(sums: Floats) -> Floats:
        return 2 * sums[..., 0] / np.maximum(sums[..., 1] + sums[..., 2], 1)

    def parts(sums: Floats) -> dict[str, float]:
        hits, found, real = sums.tolist()
        return {"precision": hits / max(found, 1), "recall": hits / max(real, 1)}

    return Counted(
        "span_f1", table, f1, "scheme:BIO|average:micro", "more", size=lambda s: int(s[2]), parts=parts
    )


def spans(tags: Sequence[str]) -> set[Span]:
    """(start, end, type) of every span; an I that continues nothing of its type starts one."""
    found: set[Span] = set()
    start, kind = 0, ""
    for i, tag in enumerate([*tags, "O"]):
        mark, _, name = tag.partition("-")
        if kind and not (mark == "I" and name == kind):
            found.add((start, i, kind))
            kind = ""
        if mark in ("B", "I") and not kind:
            start, kind = i, name or tag
    return found


def _same(predicted: Sequence[object], gold: Sequence[object]) -> None:
    if len(predicted) != len(gold):
        raise DataError(f"{len(predicted)} predictions but {len(gold)} gold labels: each needs one")
