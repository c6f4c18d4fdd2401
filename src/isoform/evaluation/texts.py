"""How near generated texts come to their references, through sacrebleu and by exact counts (R35)."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from isoform import __version__
from isoform.errors import DataError, did_you_mean
from isoform.evaluation.edit import edit_distance
from isoform.evaluation.score import Better, Counted, Floats, ratio

if TYPE_CHECKING:
    from sacrebleu.metrics.base import Metric

References = Sequence[str] | Sequence[Sequence[str]]
Normalisation = Literal["none", "nfc", "spaces"]
Unit = Literal["tokens", "characters"]


def bleu(outputs: Sequence[str], references: References, *, tokenize: str = "13a") -> Counted:
    """Corpus BLEU (Papineni et al. 2002; Post 2018), 0–100.

    Args:
        outputs: what was generated.
        references: one for each output, or a list of them.
        tokenize: sacrebleu's name of the tokenisation: ``13a``, ``intl``, ``char``, ``zh`` …
    """
    from sacrebleu.metrics.bleu import BLEU

    known = sorted(BLEU.TOKENIZERS)
    if tokenize not in known:
        raise DataError(f"bleu: no tokenisation {tokenize!r}{did_you_mean(tokenize, known)}")
    return _sacrebleu("bleu", BLEU(tokenize=tokenize, force=True), outputs, references, "more")


def chrf(outputs: Sequence[str], references: References, *, word_order: int = 0) -> Counted:
    """chrF (Popović 2015), 0–100; chrF++ with ``word_order`` 2."""
    from sacrebleu.metrics.chrf import CHRF

    return _sacrebleu("chrf", CHRF(word_order=word_order), outputs, references, "more")


def ter(outputs: Sequence[str], references: References) -> Counted:
    """Translation edit rate (Snover et al. 2006), in percent of the reference's words."""
    from sacrebleu.metrics.ter import TER

    return _sacrebleu("ter", TER(), outputs, references, "less")


def exact_match(
    outputs: Sequence[str], references: References, *, normalisation: Normalisation = "none"
) -> Counted:
    """Share of outputs that equal a reference.

    Args:
        outputs: what was generated.
        references: one for each output, or a list of which any counts.
        normalisation: what both are put through before: ``"none"``; ``"nfc"``: Unicode's composed form;
            ``"spaces"``: that, ends stripped and every run of whitespace one space.
    """
    change = _NORMALISATIONS[normalisation]
    rows = [
        (float(change(output) in {change(r) for r in right}), 1.0)
        for output, right in zip(outputs, _alternatives(outputs, references), strict=True)
    ]
    signature = f"{_signed(references)}|norm:{normalisation}|case:mixed|version:{__version__}"
    return Counted("exact_match", np.array(rows).reshape(-1, 2), ratio, signature, "more")


def error_rate(
    outputs: Sequence[str],
    references: References,
    *,
    unit: Unit = "tokens",
    normalisation: Normalisation = "none",
) -> Counted:
    """Edits over the references' length: the word or phoneme error rate over whitespace-separated tokens, the
    character error rate over code points. Of several references the one with the fewest edits per symbol.

    Args:
        outputs: what was generated.
        references: one for each output, or a list of them.
        unit: what is edited.
        normalisation: as for `exact_match`.
    """
    change = _NORMALISATIONS[normalisation]
    name = "token_error_rate" if unit == "tokens" else "character_error_rate"

    def symbols(text: str) -> Sequence[str]:
        return change(text).split() if unit == "tokens" else change(text)

    def counts(output: str, right: Sequence[str]) -> tuple[int, int]:
        mine = symbols(output)
        pairs = [(edit_distance(mine, other), len(other)) for other in map(symbols, right)]
        return min(pairs, key=lambda pair: (pair[0] / max(pair[1], 1), -pair[1]))

    rows = [
        counts(output, right)
        for output, right in zip(outputs, _alternatives(outputs, references), strict=True)
    ]
    table = np.array(rows, dtype=np.float64).reshape(-1, 2)
    if len(table) and not table[:, 1].sum():
        raise DataError(f"{name}: all references are empty; a rate over nothing is no figure")
    signature = f"{_signed(references)}|unit:{unit}|norm:{normalisation}|case:mixed|version:{__version__}"
    return Counted(name, table, ratio, signature, "less")


def _sacrebleu(
    name: str, metric: Metric, outputs: Sequence[str], references: References, better: Better
) -> Counted:
    """A metric of sacrebleu as a function of its own sufficient statistics.

    They are what its `corpus_score` sums and its significance tests resample; through them values, intervals,
    groups and paired tests are one computation here as well.
    """
    right = _alternatives(outputs, references)
    most = max((len(r) for r in right), default=1)
    streams: Any = [[r[i] if i < len(r) else None for r in right] for i in range(most)]
    rows = metric._extract_corpus_statistics(list(outputs), streams)  # pyright: ignore[reportPrivateUsage]
    counts = np.array(rows, dtype=np.float64).reshape(len(outputs), -1)

    def value(sums: Floats) -> Floats:
        flat: list[list[Any]] = sums.reshape(-1, sums.shape[-1]).tolist()
        found = [metric._compute_score_from_stats(row).score for row in flat]  # pyright: ignore[reportPrivateUsage]
        return np.array(found).reshape(sums.shape[:-1])

    return Counted(name, counts, value, str(metric.get_signature()), better)


def _alternatives(outputs: Sequence[str], references: References) -> list[Sequence[str]]:
    if len(outputs) != len(references):
        raise DataError(f"{len(outputs)} outputs but {len(references)} references: each output needs one")
    if not outputs:
        raise DataError("there are no outputs: there is nothing to score")
    right = [[r] if isinstance(r, str) else r for r in references]
    for number, found in enumerate(right):
        if not found:
            raise DataError(f"output {number + 1} has no reference")
    return right


def _signed(references: References) -> str:
    sizes = {1 if isinstance(r, str) else len(r) for r in references}
    return f"nrefs:{sizes.pop() if len(sizes) == 1 else 'var'}"


def _spaces(text: str) -> str:
    return " ".join(_nfc(text).split())


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


_NORMALISATIONS: dict[Normalisation, Callable[[str], str]] = {"none": str, "nfc": _nfc, "spaces": _spaces}
