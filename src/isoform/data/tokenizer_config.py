"""The run file's section on tokenizers: which kind, how large, and every special token by name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from isoform.config.base import Frozen, Nullable


class Specials(Frozen):
    """Names of the special tokens; None means that there is no such token. Pad is never eos (R44).

    ``extra`` are atomic tokens that may stand in the text, e.g. ``">>de<<"`` or ``"<mask>"``.
    """

    pad: Nullable[str] = "<pad>"
    """Fills rows up."""
    bos: Nullable[str] = "<s>"
    """Begins a text, and the decoder's input."""
    eos: Nullable[str] = "</s>"
    """Ends a text."""
    unk: Nullable[str] = "<unk>"
    """Stands for what the vocabulary cannot say."""
    extra: tuple[str, ...] = ()
    """Further tokens that are never cut."""

    @model_validator(mode="after")
    def _consistent(self) -> Specials:
        if self.pad is not None and self.pad == self.eos:
            raise ValueError(f"pad and eos are both {self.pad!r}; pad is never eos")
        if self.pad is not None and self.pad in (self.bos, self.unk):
            raise ValueError(f"pad is {self.pad!r}, and so is another special token")
        names = [name for name in (self.pad, self.bos, self.eos, self.unk) if name is not None]
        if any(not name.strip() for name in (*names, *self.extra)):
            raise ValueError("a special token must not be blank")
        twice = [name for name in self.extra if name in names or self.extra.count(name) > 1]
        if twice:
            raise ValueError(f"extra token {twice[0]!r} is given twice")
        return self


class Trained(Frozen):
    """What every tokenizer trained here says: how text is changed before it is cut, and its specials.

    Both changes belong to the tokenizer, travel with it, and are not undone by decoding. ``max_texts``
    learns from so many texts at most, taken at even distances; None learns from all.
    """

    max_texts: Annotated[int, Field(ge=1)] | None = None
    """Texts that are learnt from at most; unset: all."""
    normalization: Literal["none", "NFC", "NFKC"] = "none"
    """Unicode normal form that texts are brought into."""
    lowercase: bool = False
    """Whether letters are made small."""
    specials: Specials = Specials()
    """The special tokens."""


class _KnowsUnknown(Trained):
    @model_validator(mode="after")
    def _needs_unknown(self) -> _KnowsUnknown:
        if self.specials.unk is None:
            raise ValueError("specials.unk is needed: not every text can be said with this vocabulary")
        if self.specials.unk in (self.specials.bos, self.specials.eos):
            raise ValueError(f"specials.unk is {self.specials.unk!r}, and so is another special token")
        return self


class Characters(_KnowsUnknown):
    """One token a Unicode code point; the most frequent ones when ``vocab_size`` is given."""

    kind: Literal["characters"] = "characters"
    vocab_size: Annotated[int, Field(ge=2)] | None = None
    """Entries of the vocabulary, specials counted."""


class Words(_KnowsUnknown):
    """One token a whitespace-separated word, e.g. for phonemes; decoding joins with single spaces."""

    kind: Literal["words"] = "words"
    vocab_size: Annotated[int, Field(ge=2)] | None = None
    """Entries of the vocabulary, specials counted."""


class BytesBpe(Trained):
    """Byte-pair encoding over UTF-8 bytes: no unknown token exists, and every text comes back exactly.

    ``digits``: whether digits may merge into numbers or each stays one token.
    """

    kind: Literal["bytes_bpe"] = "bytes_bpe"
    vocab_size: Annotated[int, Field(ge=257)]
    """Entries of the vocabulary, specials counted."""
    min_frequency: Annotated[int, Field(ge=1)] = 2
    """How often a pair of pieces must occur to be merged."""
    digits: Literal["merged", "single"] = "merged"
    """Whether digits may merge into numbers."""
    specials: Specials = Specials(unk=None)
    """The special tokens."""

    @model_validator(mode="after")
    def _consistent(self) -> BytesBpe:
        if self.specials.unk is not None:
            raise ValueError('bytes_bpe knows every text, so specials.unk must be left out or "none"')
        return self

    @model_validator(mode="before")
    @classmethod
    def _no_unknown(cls, data: object) -> object:
        """Partly written specials keep this kind's own default for the token they leave out."""
        if isinstance(data, dict) and isinstance(data.get("specials"), dict):
            return {**data, "specials": {"unk": None, **data["specials"]}}
        return data


class Unigram(_KnowsUnknown):
    """Unigram language model over pieces (Kudo 2018), words bounded by spaces."""

    kind: Literal["unigram"] = "unigram"
    vocab_size: Annotated[int, Field(ge=2)]
    """Entries of the vocabulary, specials counted."""


class TokenizerFile(Frozen):
    """A tokenizer brought along: ``tokenizer.json`` or a SentencePiece ``.model``.

    ``specials`` names the tokens of the file that play each part; nothing is guessed.
    """

    kind: Literal["file"] = "file"
    path: Path
    """The file."""
    specials: Specials
    """The special tokens."""


TokenizerConfig = Annotated[
    Characters | Words | BytesBpe | Unigram | TokenizerFile, Field(discriminator="kind")
]


class TokenizersConfig(Frozen):
    """Either one tokenizer for everything (``shared``) or one a side (``source`` and ``target``)."""

    shared: TokenizerConfig | None = None
    """One tokenizer for both sides."""
    source: TokenizerConfig | None = None
    """That of the source side."""
    target: TokenizerConfig | None = None
    """That of the target side, or of the only one."""

    @model_validator(mode="after")
    def _consistent(self) -> TokenizersConfig:
        both = self.source is not None and self.target is not None
        either = self.source is not None or self.target is not None
        if (self.shared is not None) == either or either != both:
            raise ValueError("give either shared, or source and target")
        return self
