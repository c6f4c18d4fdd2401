"""From records to ids, once for the whole corpus, with limits on length applied as the run file says."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from isoform.data.config import OverLong
from isoform.data.progress import track
from isoform.data.ragged import Ints, Ragged
from isoform.data.records import Document, Labelled, Pair, Prompted, Record, Records, Tagged
from isoform.data.tokenizer import Tokenizer
from isoform.errors import DataError, did_you_mean

CHUNK = 8_192  # texts encoded between two steps of the bar
STREAM_CHUNK = 1_000_000  # characters


@dataclasses.dataclass(frozen=True)
class Fit:
    """What the limits did.

    Attributes:
        kept: ``[N]`` the record each row comes from.
        dropped: how many records were over a limit and left out.
        truncated: how many were cut.
    """

    kept: Ints
    dropped: int
    truncated: int


@dataclasses.dataclass(frozen=True)
class EncodedPairs:
    """Sources between their template's ids, and targets with their end of sequence."""

    source: Ragged
    target: Ragged
    fit: Fit


@dataclasses.dataclass(frozen=True)
class EncodedTexts:
    """Texts between their template's ids."""

    tokens: Ragged
    fit: Fit


@dataclasses.dataclass(frozen=True)
class EncodedPrompts:
    """Prompt, answer and end of sequence in one row; ``prefix [N]`` counts the prompt's ids."""

    tokens: Ragged
    prefix: Ints
    fit: Fit


@dataclasses.dataclass(frozen=True)
class EncodedLabels:
    """Texts and ``labels [N]``."""

    tokens: Ragged
    labels: Ints
    fit: Fit


@dataclasses.dataclass(frozen=True)
class EncodedTags:
    """Words, and for every id a tag: the word's on its first id, -1 on the others."""

    tokens: Ragged
    tags: Ragged
    fit: Fit


def encode_pairs(
    records: Records[Pair],
    source: Tokenizer,
    target: Tokenizer,
    *,
    max_source: int | None,
    max_target: int | None,
    over_long: OverLong,
) -> EncodedPairs:
    """Encode both sides: the source between its tokenizer's template, the target followed by its EOS.

    Raises:
        DataError: a record over a limit where the policy is ``"error"``, or one without any id.
        TokenizerError: the target's tokenizer has no end-of-sequence token.
    """
    left = encode_texts([r.source for r in records.items], source, _around(source), "source")
    right = encode_texts(
        [r.target for r in records.items], target, ((), (target.special.require("eos"),)), "target"
    )
    limits = {"source": (left, max_source), "target": (right, max_target)}
    fit = fit_lengths(records, {n: (r.lengths, limit) for n, (r, limit) in limits.items()}, over_long)
    done = {n: _apply(ragged, limit, fit) for n, (ragged, limit) in limits.items()}
    for name, ragged in done.items():
        _refuse_nothing(records, fit, ragged, name)
    return EncodedPairs(done["source"], done["target"], fit)


def encode_documents(
    records: Records[Document], tokenizer: Tokenizer, *, max_length: int | None, over_long: OverLong
) -> EncodedTexts:
    """Encode each document between its tokenizer's template."""
    return _encode_single(records, [r.text for r in records.items], tokenizer, max_length, over_long)


def encode_prompted(
    records: Records[Prompted], tokenizer: Tokenizer, *, max_length: int | None, over_long: OverLong
) -> EncodedPrompts:
    """Encode prompts (after the beginning-of-sequence id, if there is one) and answers with their EOS.

    Truncation cuts the answer.

    Raises:
        DataError: a record over the limit where the policy is ``"error"``, a prompt that leaves no room
            for an answer, or one without any id, whose answer could not be predicted from anything.
    """
    special = tokenizer.special
    bos = () if special.bos is None else (special.bos,)
    prompts = encode_texts([r.prompt for r in records.items], tokenizer, (bos, ()), "prompts")
    answers = encode_texts(
        [r.answer for r in records.items], tokenizer, ((), (special.require("eos"),)), "answers"
    )
    joined = Ragged.from_lists([prompts.row(i) + answers.row(i) for i in range(len(records))])
    fit = fit_lengths(records, {"prompt and answer": (joined.lengths, max_length)}, over_long)
    prefix = prompts.lengths[fit.kept]
    for bad, reason in (
        (prefix == 0, "the prompt has no tokens and the tokenizer no bos to stand for it"),
        (prefix >= (max_length or np.inf), f"the prompt alone fills max_length = {max_length}"),
    ):
        if bad.any():
            raise DataError(f"{records.where(int(fit.kept[bad.argmax()]))}: {reason}")
    return EncodedPrompts(_apply(joined, max_length, fit), prefix, fit)


def encode_labelled(
    records: Records[Labelled],
    tokenizer: Tokenizer,
    classes: Mapping[str, int],
    *,
    max_length: int | None,
    over_long: OverLong,
) -> EncodedLabels:
    """Encode texts and number their labels.

    Raises:
        DataError: over-long as above, or a label that is not among the classes.
    """
    labels = np.array([_class(records, i, r.label, classes) for i, r in enumerate(records.items)], np.int64)
    texts = _encode_single(records, [r.text for r in records.items], tokenizer, max_length, over_long)
    return EncodedLabels(texts.tokens, labels[texts.fit.kept], texts.fit)


def encode_tagged(
    records: Records[Tagged],
    tokenizer: Tokenizer,
    classes: Mapping[str, int],
    *,
    max_length: int | None,
    over_long: OverLong,
) -> EncodedTags:
    """Encode words; the first id of each carries its tag.

    Raises:
        DataError: over-long as above, a tag that is not among the classes, or a word without any id.
    """
    ids: list[list[int]] = []
    tags: list[list[int]] = []
    before, after = _around(tokenizer)
    for index, record in enumerate(track(records.items, total=len(records), what="encoding words")):
        row, first = tokenizer.encode_words(record.words)
        marks = [-1] * (len(before) + len(row) + len(after))
        for word, tag, place in zip(record.words, record.tags, first, strict=True):
            if place < 0:
                raise DataError(f"{records.where(index)}: the tokenizer leaves nothing of the word {word!r}")
            marks[len(before) + place] = _class(records, index, tag, classes)
        ids.append([*before, *row, *after])
        tags.append(marks)
    tokens = Ragged.from_lists(ids)
    fit = fit_lengths(records, {"text": (tokens.lengths, max_length)}, over_long)
    marked = _apply(Ragged.from_lists(tags), max_length, fit)
    return EncodedTags(_apply(tokens, max_length, fit), marked, fit)


def encode_stream(text: str, tokenizer: Tokenizer) -> NDArray[np.int32]:
    """The ids of one long text, without any added."""
    parts = _stream_parts(text) if tokenizer.backend.line_ends_cut() else [text]
    ids = [
        np.asarray(tokenizer.encode(part), np.int32)
        for part in track(parts, total=len(parts), what="encoding text")
    ]
    return np.concatenate(ids)


def encode_texts(
    texts: Sequence[str], tokenizer: Tokenizer, around: tuple[Sequence[int], Sequence[int]], what: str
) -> Ragged:
    """Encode many texts and put ids before and after each."""
    before, after = list(around[0]), list(around[1])
    starts = range(0, len(texts), CHUNK)
    chunks = (
        Ragged.from_lists(
            [before + row + after for row in tokenizer.encode_batch(texts[start : start + CHUNK])]
        )
        for start in track(starts, total=len(starts), what=f"encoding {what}")
    )
    return Ragged.concatenate(chunks) if texts else Ragged.from_lists([])


def classes_of(labels: Sequence[str]) -> dict[str, int]:
    """Number the distinct labels in alphabetical order."""
    return {label: number for number, label in enumerate(sorted(set(labels)))}


def fit_lengths(
    records: Records[Record],
    sides: Mapping[str, tuple[Ints, int | None]],
    over_long: OverLong,
) -> Fit:
    """Apply the limits to lengths: which records stay, and how many were dropped or are to be cut.

    Raises:
        DataError: a record over its limit where the policy is ``"error"``, or nothing is left.
    """
    over = {n: lengths > limit for n, (lengths, limit) in sides.items() if limit is not None}
    bad = np.logical_or.reduce(list(over.values())) if over else np.zeros(len(records), dtype=bool)
    if not bad.any() or over_long == "truncate":
        return Fit(np.arange(len(records)), 0, int(bad.sum()))
    if over_long == "error":
        first = int(bad.argmax())
        name = next(n for n, mask in over.items() if mask[first])
        lengths, limit = sides[name]
        raise DataError(
            f"{records.where(first)}: {name} of {int(lengths[first])} tokens, the limit is {limit}"
            f' ({int(bad.sum())} such in {records.name}); raise it, or set over_long = "drop" or "truncate"'
        )
    kept = np.flatnonzero(~bad)
    if not len(kept):
        raise DataError(f"{records.where(0)}: every record of {records.name} is over the limit")
    return Fit(kept, int(bad.sum()), 0)


def _encode_single(
    records: Records[Document] | Records[Labelled],
    texts: list[str],
    tokenizer: Tokenizer,
    max_length: int | None,
    over_long: OverLong,
) -> EncodedTexts:
    tokens = encode_texts(texts, tokenizer, _around(tokenizer), "text")
    fit = fit_lengths(records, {"text": (tokens.lengths, max_length)}, over_long)
    done = _apply(tokens, max_length, fit)
    _refuse_nothing(records, fit, done, "text")
    return EncodedTexts(done, fit)


def _around(tokenizer: Tokenizer) -> tuple[Sequence[int], Sequence[int]]:
    return tokenizer.template.prefix, tokenizer.template.suffix


def _apply(ragged: Ragged, limit: int | None, fit: Fit) -> Ragged:
    kept = ragged.select(fit.kept)
    return kept if limit is None else kept.cut(limit)


def _refuse_nothing(records: Records[Record], fit: Fit, ragged: Ragged, name: str) -> None:
    """A row without ids would be padding only."""
    if len(ragged) and ragged.lengths.min() == 0:
        row = int(ragged.lengths.argmin())
        raise DataError(
            f"{records.where(int(fit.kept[row]))}: the {name} has no tokens: its row would be all padding"
        )


def _class(records: Records[Record], index: int, label: str, classes: Mapping[str, int]) -> int:
    found = classes.get(label)
    if found is None:
        raise DataError(f"{records.where(index)}: unknown label {label!r}{did_you_mean(label, classes)}")
    return found


def _stream_parts(text: str) -> list[str]:
    """Cut before a line end that follows a letter, at which no pre-tokenizer here joins anything."""
    parts: list[str] = []
    start = 0
    boundary = re.compile(r"(?<=[^\W\d_])(?=\n)")
    while len(text) - start > STREAM_CHUNK and (found := boundary.search(text, start + STREAM_CHUNK)):
        parts.append(text[start : found.start()])
        start = found.start()
    return [*parts, text[start:]]
