"""The face that a tokenizer's library has, and `tokenizers` behind it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from isoform.errors import TokenizerError

if TYPE_CHECKING:
    import tokenizers

TextSpecials = Literal["text", "tokens"]


class Backend(Protocol):
    """What a tokenizer needs of a library. Nothing is ever added to the ids."""

    suffix: str

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text."""
        ...

    def encode_words(self, words: Sequence[str]) -> tuple[list[int], list[int]]:
        """The ids of words standing in one text, and the place of each word's first id (-1: it has none)."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, all of them written out."""
        ...

    def vocabulary(self) -> dict[str, int]:
        """Every token and its id."""
        ...

    def silent(self) -> frozenset[int]:
        """Ids the library itself calls special."""
        ...

    def serialise(self) -> bytes:
        """The file to save."""
        ...

    def settings(self) -> dict[str, Any]:
        """What the file does not say, to save beside it."""
        ...

    def canonical(self) -> bytes:
        """What decides the ids, and nothing else: equal for two that agree on every text."""
        ...

    def line_ends_cut(self) -> bool:
        """Whether text may be cut before a line end that follows a letter, without changing any id."""
        ...

    def byte_level(self) -> bool:
        """Whether the characters of a token stand for bytes."""
        ...


class HuggingFace:
    """A tokenizer of the `tokenizers` library.

    Args:
        inner: the library's tokenizer.
        specials_in_text: whether special tokens written out in the text become their ids (``"tokens"``,
            what the transformers library does) or remain text (``"text"``). Added tokens that are not
            marked special always become their ids.
    """

    suffix = ".json"

    def __init__(self, inner: tokenizers.Tokenizer, specials_in_text: TextSpecials) -> None:
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = specials_in_text == "text"
        self.inner = inner
        self.specials_in_text: TextSpecials = specials_in_text

    @classmethod
    def from_bytes(cls, data: bytes, specials_in_text: TextSpecials, where: str) -> HuggingFace:
        """Read a ``tokenizer.json``.

        Raises:
            TokenizerError: it is not one.
        """
        import tokenizers

        try:
            return cls(tokenizers.Tokenizer.from_str(data.decode("utf-8")), specials_in_text)
        except Exception as error:  # the library raises plain exceptions
            raise TokenizerError(f"{where}: not a tokenizer.json: {' '.join(str(error).split())}") from None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self.inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_words(self, words: Sequence[str]) -> tuple[list[int], list[int]]:
        encoding = self.inner.encode(" ".join(words), add_special_tokens=False)
        first: list[int] = []
        start, place, offsets = 0, 0, encoding.offsets
        for word in words:
            end = start + len(word)
            while place < len(offsets) and offsets[place][1] <= start:
                place += 1
            first.append(place if place < len(offsets) and offsets[place][0] < end else -1)
            start = end + 1
        return encoding.ids, first

    def decode(self, ids: Sequence[int]) -> str:
        return self.inner.decode(list(ids), skip_special_tokens=False)

    def vocabulary(self) -> dict[str, int]:
        return self.inner.get_vocab(with_added_tokens=True)

    def silent(self) -> frozenset[int]:
        return frozenset(i for i, t in self.inner.get_added_tokens_decoder().items() if t.special)

    def serialise(self) -> bytes:
        return self.inner.to_str(pretty=False).encode("utf-8")

    def settings(self) -> dict[str, Any]:
        return {"specials_in_text": self.specials_in_text}

    def canonical(self) -> bytes:
        state = json.loads(self.inner.to_str())
        for name in ("version", "truncation", "padding", "post_processor"):
            state.pop(name, None)
        return json.dumps([state, self.specials_in_text], sort_keys=True, ensure_ascii=False).encode("utf-8")

    def byte_level(self) -> bool:
        decoder = json.loads(self.inner.to_str())["decoder"]
        steps = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder]
        return any(step is not None and step["type"] == "ByteLevel" for step in steps)

    def line_ends_cut(self) -> bool:
        state = json.loads(self.inner.to_str())
        normal = state["normalizer"]
        steps = (
            normal["normalizers"] if normal and normal["type"] == "Sequence" else [normal] if normal else []
        )
        if any(step["type"] not in ("NFC", "NFKC", "Lowercase") for step in steps):
            return False
        cutter = state["pre_tokenizer"]
        cutters = cutter["pretokenizers"] if cutter and cutter["type"] == "Sequence" else [cutter]
        return any(
            cutter is not None
            and (
                (cutter["type"] == "ByteLevel" and cutter["use_regex"] and not cutter["add_prefix_space"])
                or (cutter["type"] == "Split" and cutter["pattern"].get("Regex") in (r"[\s\S]", r"\n"))
                or cutter["type"] == "WhitespaceSplit"
            )
            for cutter in cutters
        )
