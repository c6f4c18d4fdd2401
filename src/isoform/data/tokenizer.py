"""One face for every tokenizer: text to ids and back, with special ids told apart and nothing implied."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isoform.config.files import write_bytes, write_text
from isoform.data.backends import Backend, HuggingFace, TextSpecials
from isoform.data.byte_level import written_out
from isoform.data.sentencepiece_model import Prefix, SentencePiece
from isoform.data.specials import SpecialIds
from isoform.data.tokenizer_config import BytesBpe, Characters, Specials, Unigram, Words
from isoform.errors import DataError, TokenizerError, did_you_mean

if TYPE_CHECKING:
    import tokenizers


@dataclasses.dataclass(frozen=True)
class Template:
    """Ids put before and after an encoded text."""

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.prefix) + len(self.suffix)


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to ids and back.

    Attributes:
        backend: the library that does it.
        special: the ids that play a part.
        template: what `encode_with_template` puts around a text; `encode` adds nothing.
    """

    backend: Backend = dataclasses.field(repr=False)
    special: SpecialIds
    template: Template = Template()

    def __post_init__(self) -> None:
        known = set(self._vocabulary.values())
        for name, number in self.special.named().items():
            if number not in known:
                raise TokenizerError(
                    f"special token {name} has id {number}, which no token of the vocabulary has"
                )

    @classmethod
    def train(
        cls, config: Characters | Words | BytesBpe | Unigram, texts: Iterable[str], *, where: str
    ) -> Tokenizer:
        """Learn a vocabulary of at most ``vocab_size`` tokens. The same texts give the same ids.

        Ids: the unknown token first (where there is one), then the vocabulary, then pad, bos, eos and the
        extra tokens. Special tokens written out in a text remain text; extra tokens become their ids.

        Args:
            config: kind, size and specials.
            texts: what to learn from: the training part only.
            where: what the texts are, for messages.

        Raises:
            TokenizerError: no text, a size too small, or a special token that is also ordinary text.
        """
        from isoform.data.train_tokenizer import train

        inner = train(config, texts, where)
        special = SpecialIds.find(config.specials, inner.token_to_id, where)
        return cls(HuggingFace(inner, "text"), special)

    @classmethod
    def from_file(cls, path: Path, specials: Specials) -> Tokenizer:
        """A ``tokenizer.json`` or a SentencePiece ``.model`` brought along.

        Extra tokens that a ``.model`` lacks are numbered after its last piece, in the given order.

        Raises:
            TokenizerError: missing, of another kind, or without one of the named tokens.
        """
        data = _read(path)
        if path.suffix == ".model":
            bare = SentencePiece(data, {}, None, None, str(path))
            vocabulary = bare.vocabulary()
            size = max(vocabulary.values()) + 1
            new = [name for name in specials.extra if name not in vocabulary]
            added = {name: size + i for i, name in enumerate(new)}
            backend: Backend = SentencePiece(data, added, None, None, str(path)) if added else bare
        elif path.suffix == ".json":
            backend = HuggingFace.from_bytes(data, "tokens", str(path))
        else:
            raise TokenizerError(f"{path}: expected a tokenizer.json or a SentencePiece .model")
        return cls(backend, SpecialIds.find(specials, backend.vocabulary().get, str(path)))

    @classmethod
    def from_huggingface(
        cls,
        inner: tokenizers.Tokenizer,
        special: SpecialIds,
        template: Template = Template(),
        *,
        specials_in_text: TextSpecials,
    ) -> Tokenizer:
        """Wrap a tokenizer of the `tokenizers` library."""
        return cls(HuggingFace(inner, specials_in_text), special, template)

    @classmethod
    def from_sentencepiece(
        cls,
        model: bytes,
        special: SpecialIds,
        template: Template = Template(),
        *,
        added: Mapping[str, int],
        pieces: Mapping[str, int] | None,
        where: str,
        albert: Mapping[str, bool] | None = None,
        prefix: Prefix = "parts",
        greedy: Sequence[str] = (),
    ) -> Tokenizer:
        """Wrap a SentencePiece model; see `SentencePiece` for what is not said here."""
        backend = SentencePiece(model, added, pieces, special.unk, where, albert, prefix, greedy)
        return cls(backend, special, template)

    def encode(self, text: str) -> list[int]:
        """The ids of a text; nothing is added."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts; nothing is added.

        Raises:
            TokenizerError: half a surrogate pair, as arguments that are not UTF-8 have, is no text.
        """
        try:
            return self.backend.encode_batch(texts)
        except (TypeError, UnicodeEncodeError):
            for text in texts:
                if any("\ud800" <= char <= "\udfff" for char in text):
                    raise TokenizerError(f"{text[:40]!r}: half a surrogate pair, which is no text") from None
            raise

    def encode_with_template(self, text: str) -> list[int]:
        """The ids of a text between those of the template."""
        return [*self.template.prefix, *self.encode(text), *self.template.suffix]

    def encode_words(self, words: Sequence[str]) -> tuple[list[int], list[int]]:
        """The ids of words in one text, and the place of each word's first id (-1: it has none)."""
        return self.backend.encode_words(words)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of ids. Special tokens but the unknown one are left out, or written out.

        Raises:
            TokenizerError: an id outside the vocabulary.
        """
        for number in ids:
            if number not in self._tokens:
                raise TokenizerError(f"id {number} is not in the vocabulary of {self.vocab_size} tokens")
        return self.backend.decode([i for i in ids if i not in self.silent] if skip_special else ids)

    @functools.cached_property
    def vocab_size(self) -> int:
        """The largest id plus one: the rows an embedding table needs."""
        return max(self._vocabulary.values()) + 1

    @functools.cached_property
    def _byte_level(self) -> bool:
        return self.backend.byte_level()

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 over what decides the ids. Two tokenizers share a vocabulary (R27) when it agrees.

        The template is not part of it: it changes what is put around a text, not what an id means.
        """
        special = json.dumps(self._special_state(), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(self.backend.canonical() + special.encode("utf-8")).hexdigest()

    def token(self, number: int) -> str:
        """The token of an id.

        Raises:
            TokenizerError: there is none.
        """
        if number not in self._tokens:
            raise TokenizerError(f"id {number} is not in the vocabulary of {self.vocab_size} tokens")
        return self._tokens[number]

    def shown(self, number: int) -> str:
        """The token of an id for people to read: of a byte-level vocabulary the text that its bytes are.

        Raises:
            TokenizerError: there is none.
        """
        token = self.token(number)
        return written_out(token) if self._byte_level and number not in self.silent else token

    def id(self, token: str) -> int:
        """The id of a token.

        Raises:
            TokenizerError: there is none.
        """
        if token not in self._vocabulary:
            hint = did_you_mean(token, self._vocabulary)
            raise TokenizerError(f"no token {token!r}{hint if hint.startswith('; did') else ''}")
        return self._vocabulary[token]

    def with_template(self, template: Template) -> Tokenizer:
        """The same vocabulary with other ids put around a text."""
        return dataclasses.replace(self, template=template)

    def save(self, folder: Path, name: str = "tokenizer") -> list[Path]:
        """Write ``name.json`` or ``name.model``, and ``name.specials.json`` beside it.

        Returns:
            The files written.
        """
        main, beside = folder / f"{name}{self.backend.suffix}", folder / f"{name}.specials.json"
        state = {
            "file": main.name,
            "special": self._special_state(),
            "template": dataclasses.asdict(self.template),
            "settings": self.backend.settings(),
            "digest": self.digest,
        }
        write_bytes(main, self.backend.serialise())
        write_text(beside, json.dumps(state, indent=1, ensure_ascii=False) + "\n")
        return [main, beside]

    @classmethod
    def load(cls, folder: Path, name: str = "tokenizer") -> Tokenizer:
        """Read what `save` wrote.

        Raises:
            TokenizerError: a file is missing or damaged, or the vocabulary is not the one that was saved.
        """
        beside = folder / f"{name}.specials.json"
        try:
            state: dict[str, Any] = json.loads(_read(beside))
            file, digest, settings = folder / state["file"], str(state["digest"]), dict(state["settings"])
            special = SpecialIds(**state["special"])
            template = Template(**{key: tuple(value) for key, value in state["template"].items()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TokenizerError(f"{beside}: damaged: {type(error).__name__}: {error}") from None
        data = _read(file)
        try:
            if file.suffix == ".model":
                backend: Backend = SentencePiece(data, **settings, where=str(file))
            else:
                backend = HuggingFace.from_bytes(data, **settings, where=str(file))
        except TypeError as error:
            raise TokenizerError(f"{beside}: damaged: settings: {error}") from None
        found = cls(backend, special, template)
        if found.digest != digest:
            raise TokenizerError(
                f"{file}: a foreign vocabulary: its digest is {found.digest[:12]}…,"
                f" {beside.name} says {digest[:12]}…"
            )
        return found

    @functools.cached_property
    def _vocabulary(self) -> dict[str, int]:
        return self.backend.vocabulary()

    @functools.cached_property
    def _tokens(self) -> dict[int, str]:
        return {number: token for token, number in self._vocabulary.items()}

    @functools.cached_property
    def ids(self) -> frozenset[int]:
        """Every id that a token has."""
        return frozenset(self._tokens)

    @functools.cached_property
    def silent(self) -> frozenset[int]:
        """Ids that stand for no text: every special token but the unknown one."""
        return (self.backend.silent() | self.special.silent()) - {self.special.unk}

    def _special_state(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self.special), "extra": dict(self.special.extra)}


def _read(path: Path) -> bytes:
    from isoform.data.files import read_bytes

    try:
        return read_bytes(path)
    except DataError as error:
        raise TokenizerError(str(error)) from None
