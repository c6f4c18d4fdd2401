"""Learning a vocabulary from text: characters, words, byte-level BPE, unigram. All are deterministic."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from isoform.data.tokenizer_config import BytesBpe, Characters, Specials, Unigram, Words
from isoform.errors import TokenizerError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHARACTER = r"[\s\S]"
LONGEST_RUN = 2000  # characters
BYTES = 256


def train(config: Characters | Words | BytesBpe | Unigram, texts: Iterable[str], where: str) -> Tokenizer:
    """Train a tokenizer of the `tokenizers` library; see `isoform.data.tokenizer.Tokenizer.train`."""
    if config.max_texts is not None:
        known = list(texts)
        texts = known[:: -(-len(known) // config.max_texts)] if known else known
    ordinary = _without_extras(texts, config.specials.extra)
    room = None if config.vocab_size is None else config.vocab_size - _count(config.specials)
    floor = BYTES if isinstance(config, BytesBpe) else 1
    if room is not None and room < floor:
        raise TokenizerError(
            f"{where}: vocab_size {config.vocab_size} is too small: {_count(config.specials)} special tokens"
            f" and at least {floor} others are needed"
        )
    if isinstance(config, Characters):
        inner = _characters(config, ordinary, room, where)
    elif isinstance(config, Words):
        inner = _words(config, ordinary, room, where)
    elif isinstance(config, BytesBpe):
        assert room is not None
        inner = _bytes_bpe(config, ordinary, room, where)
    else:
        assert room is not None
        inner = _unigram(config, ordinary, room, where)
    _add_specials(inner, config.specials, where)
    return inner


def _characters(config: Characters, texts: Iterable[str], room: int | None, where: str) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    normalize = _normalizer(config)
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(normalize.normalize_str(text) if normalize else text)
    inner = Tokenizer(models.WordLevel(_frequent(counts, config.specials, room, where), config.specials.unk))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(CHARACTER), "isolated")
    inner.decoder = decoders.Fuse()
    return _with_normalizer(inner, normalize)


def _words(config: Words, texts: Iterable[str], room: int | None, where: str) -> Tokenizer:
    from tokenizers import Tokenizer, models, pre_tokenizers

    normalize, splitter = _normalizer(config), pre_tokenizers.WhitespaceSplit()
    counts: Counter[str] = Counter()
    for text in texts:
        text = normalize.normalize_str(text) if normalize else text
        counts.update(word for word, _ in splitter.pre_tokenize_str(text))
    inner = Tokenizer(models.WordLevel(_frequent(counts, config.specials, room, where), config.specials.unk))
    inner.pre_tokenizer = splitter  # without a decoder, tokens are joined by spaces
    return _with_normalizer(inner, normalize)


def _bytes_bpe(config: BytesBpe, texts: Iterable[str], room: int, where: str) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if config.digits == "single":
        inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), cut])
    else:
        inner.pre_tokenizer = cut
    inner.decoder = decoders.ByteLevel()
    _with_normalizer(inner, _normalizer(config))
    trainer = trainers.BpeTrainer(
        vocab_size=room,
        min_frequency=config.min_frequency,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(_cut(_not_empty(texts, where)), trainer)
    return inner


def _unigram(config: Unigram, texts: Iterable[str], room: int, where: str) -> Tokenizer:
    """Pieces and scores are SentencePiece's: the trainer of the `tokenizers` library adds up in an order
    that changes from run to run, and with it the vocabulary."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    normalize = _normalizer(config)
    whole = [normalize.normalize_str(text) if normalize else text for text in _not_empty(texts, where)]
    lines = [line for text in whole for line in _cut(text.split("\n")) if line]
    pieces = _sentencepiece_pieces(lines, room, where)
    if any("\n" in text for text in whole):
        # Line ends separate the trainer's sentences, so it cannot learn them; they get a piece of their own.
        pieces = [*pieces[: room - 1], ("\n", min(score for _, score in pieces))]
    inner = Tokenizer(models.Unigram([(str(config.specials.unk), 0.0), *pieces], unk_id=0))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\n"), "isolated"),
            pre_tokenizers.Metaspace(prepend_scheme="never"),
        ]
    )
    inner.decoder = decoders.Metaspace(prepend_scheme="never")
    return _with_normalizer(inner, normalize)


def _sentencepiece_pieces(lines: list[str], room: int, where: str) -> list[tuple[str, float]]:
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="unigram",
            vocab_size=room + 1,  # its own unknown token is one of them
            hard_vocab_limit=False,
            character_coverage=1.0,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            max_sentence_length=max(len(line.encode("utf-8")) for line in lines) + 1,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            unk_id=0,
            num_threads=1,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        # It puts the line of its own source and the condition that failed in front.
        reason = re.sub(r"^\w+: \S+\.cc\(\d+\) \[.*\] ", "", " ".join(str(error).split()))
        raise TokenizerError(
            f"{where}: no unigram vocabulary of {room} pieces can be made: {reason}"
        ) from None
    found = sentencepiece.SentencePieceProcessor()
    found.LoadFromSerializedProto(model.getvalue())
    return [(found.id_to_piece(i), found.get_score(i)) for i in range(1, found.get_piece_size())]


def _frequent(counts: Counter[str], specials: Specials, room: int | None, where: str) -> dict[str, int]:
    """The unknown token and the most frequent others; equally frequent ones in code point order."""
    if not counts:
        raise TokenizerError(f"{where}: no text to learn a vocabulary from")
    unk = str(specials.unk)
    if unk in counts:
        raise TokenizerError(
            f"{where}: special token {unk!r} also stands in the text as such; choose another name"
        )
    ranked = sorted(counts, key=lambda token: (-counts[token], token))[:room]
    return {token: number for number, token in enumerate([unk, *ranked])}


def _add_specials(inner: Tokenizer, specials: Specials, where: str) -> None:
    from tokenizers import AddedToken

    for name in (specials.pad, specials.bos, specials.eos, *specials.extra):
        if name is None or (
            name == specials.bos and name == specials.eos and inner.token_to_id(name) is not None
        ):
            continue
        if inner.token_to_id(name) is not None:
            raise TokenizerError(
                f"{where}: special token {name!r} is also an ordinary token of the text; choose another name"
            )
        # Extra tokens may stand in the text, so they are not "special" to the library, which can be told
        # to leave special tokens written out in a text alone.
        extra = name in specials.extra
        inner.add_tokens([AddedToken(name, normalized=False)]) if extra else inner.add_special_tokens(
            [AddedToken(name, normalized=False, special=True)]
        )


def _count(specials: Specials) -> int:
    names = {name for name in (specials.pad, specials.bos, specials.eos, specials.unk) if name is not None}
    return len(names) + len(specials.extra)


def _without_extras(texts: Iterable[str], extra: tuple[str, ...]) -> Iterator[str]:
    """Extra tokens are atomic, so nothing is learned from their letters."""
    if not extra:
        yield from texts
        return
    splitter = re.compile("|".join(re.escape(name) for name in sorted(extra, key=len, reverse=True)))
    for text in texts:
        yield from (part for part in splitter.split(text) if part)


def _not_empty(texts: Iterable[str], where: str) -> Iterator[str]:
    found = False
    for text in texts:
        found = found or bool(text)
        yield text
    if not found:
        raise TokenizerError(f"{where}: no text to learn a vocabulary from")


def _cut(texts: Iterable[str]) -> Iterator[str]:
    """Texts whose runs without a space, or of spaces alone, end somewhere: what a trainer takes for one word
    costs the square of its length, hours for a megabyte of base64."""
    run = re.compile(rf"\S{{{LONGEST_RUN}}}(?=\S)|\s{{{LONGEST_RUN}}}(?=\s)")
    for text in texts:
        start = 0
        for found in run.finditer(text) if len(text) > LONGEST_RUN else ():
            yield text[start : found.end()]
            start = found.end()
        yield text[start:]


def _normalizer(config: Characters | Words | BytesBpe | Unigram) -> Any:
    from tokenizers import normalizers

    steps: list[Any] = []
    if config.normalization != "none":
        steps.append(normalizers.NFC() if config.normalization == "NFC" else normalizers.NFKC())
    if config.lowercase:
        steps.append(normalizers.Lowercase())
    return normalizers.Sequence(steps) if steps else None


def _with_normalizer(inner: Tokenizer, normalize: Any) -> Tokenizer:
    if normalize is not None:
        inner.normalizer = normalize
    return inner
