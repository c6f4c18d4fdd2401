"""From records to ids, once for the whole corpus, with limits on length applied as the run file says."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from isoform.data.config import OverLong
from isoform.data.fit import Fit, fit_lengths
from isoform.data.progress import track
from isoform.data.ragged import Ints, Ragged
from isoform.data.records import Document, Labelled, Pair, Prompted, Record, Records, Tagged, columns
from isoform.data.tokenizer import Tokenizer
from isoform.errors import DataError, did_you_mean

CHUNK = 8_192  # texts encoded between two steps of the bar
STREAM_CHUNK = 1_000_000  # characters


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


def encode_sides(records: Records[Record], tokenizers: Mapping[str, Tokenizer]) -> dict[str, Ragged]:
    """The ids of each side of the records, nothing added. The words of tagged text are joined by spaces."""
    texts = columns(records.items)
    if len(records) == 1:  # perhaps a stream, and long
        streams = {name: encode_stream(column[0], tokenizers[name]) for name, column in texts.items()}
        return {n: Ragged(ids, np.zeros(1, np.int64), np.array([len(ids)])) for n, ids in streams.items()}
    return {
        name: encode_texts(column, tokenizers[name], f"{records.name}: {name}")
        for name, column in texts.items()
    }


def encode_pairs(
    records: Records[Pair],
    ids: Mapping[str, Ragged],
    source: Tokenizer,
    target: Tokenizer,
    *,
    max_source: int | None,
    max_target: int | None,
    over_long: OverLong,
) -> EncodedPairs:
    """Put the source between its tokenizer's template and the EOS after the target; apply the limits.

    Args:
        records: the pairs, for messages.
        ids: what `encode_sides` made of them.
        source: the source's tokenizer.
        target: the target's tokenizer.
        max_source: limit on a source's ids, specials included.
        max_target: limit on a target's ids, its EOS included.
        over_long: what to do with a pair over a limit.

    Raises:
        DataError: a record over a limit where the policy is ``"error"``, or one without any id.
        TokenizerError: the target's tokenizer has no end-of-sequence token.
    """
    left = ids["source"].around(source.template.prefix, source.template.suffix)
    right = ids["target"].around((), (target.special.require("eos"),))
    limits = {"source": (left, max_source), "target": (right, max_target)}
    fit = fit_lengths(records, {n: (r.lengths, limit) for n, (r, limit) in limits.items()}, over_long)
    done = {n: _apply(ragged, limit, fit) for n, (ragged, limit) in limits.items()}
    for name, ragged in done.items():
        _refuse_nothing(records, fit, ragged, name)
    return EncodedPairs(done["source"], done["target"], fit)


def encode_documents(
    records: Records[Document] | Records[Labelled],
    ids: Mapping[str, Ragged],
    tokenizer: Tokenizer,
    *,
    max_length: int | None,
    over_long: OverLong,
) -> EncodedTexts:
    """Put each text between its tokenizer's template; apply the limit.

    Raises:
        DataError: as `encode_pairs`.
    """
    tokens = ids["text"].around(tokenizer.template.prefix, tokenizer.template.suffix)
    fit = fit_lengths(records, {"text": (tokens.lengths, max_length)}, over_long)
    done = _apply(tokens, max_length, fit)
    _refuse_nothing(records, fit, done, "text")
    return EncodedTexts(done, fit)


def encode_prompted(
    records: Records[Prompted],
    ids: Mapping[str, Ragged],
    tokenizer: Tokenizer,
    *,
    max_length: int | None,
    over_long: OverLong,
) -> EncodedPrompts:
    """Put prompt (between its tokenizer's template), answer and EOS in one row; apply the limit.

    Truncation cuts the answer.

    Raises:
        DataError: a record over the limit where the policy is ``"error"``, a prompt that leaves no room
            for an answer, or one without any id, whose answer could not be predicted from anything.
    """
    prompts = ids["prompt"].around(tokenizer.template.prefix, tokenizer.template.suffix)
    joined = prompts.join(ids["answer"].around((), (tokenizer.special.require("eos"),)))
    fit = fit_lengths(records, {"prompt and answer": (joined.lengths, max_length)}, over_long)
    prefix = prompts.lengths[fit.kept]
    for bad, reason in (
        (prefix == 0, "the prompt has no tokens, and no bos stands for it"),
        (prefix >= (max_length or np.inf), f"the prompt alone fills max_length = {max_length}"),
    ):
        if bad.any():
            raise DataError(f"{records.where(int(fit.kept[bad.argmax()]))}: {reason}")
    return EncodedPrompts(_apply(joined, max_length, fit), prefix, fit)


def encode_labelled(
    records: Records[Labelled],
    ids: Mapping[str, Ragged],
    tokenizer: Tokenizer,
    classes: Mapping[str, int],
    *,
    max_length: int | None,
    over_long: OverLong,
) -> EncodedLabels:
    """As `encode_documents`, and number the labels.

    Raises:
        DataError: over-long as above, or a label that is not among the classes.
    """
    labels = np.array([_class(records, i, r.label, classes) for i, r in enumerate(records.items)], np.int64)
    texts = encode_documents(records, ids, tokenizer, max_length=max_length, over_long=over_long)
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
    before, after = tokenizer.template.prefix, tokenizer.template.suffix
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


def encode_texts(texts: Sequence[str], tokenizer: Tokenizer, what: str) -> Ragged:
    """Encode many texts, nothing added, with a bar that says what they are."""
    starts = range(0, len(texts), CHUNK)
    chunks = (
        Ragged.from_lists(tokenizer.encode_batch(texts[start : start + CHUNK]))
        for start in track(starts, total=len(starts), what=f"encoding {what}")
    )
    return Ragged.concatenate(chunks) if texts else Ragged.from_lists([])


def classes_of(labels: Sequence[str]) -> dict[str, int]:
    """Number the distinct labels in alphabetical order."""
    return {label: number for number, label in enumerate(sorted(set(labels)))}


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
