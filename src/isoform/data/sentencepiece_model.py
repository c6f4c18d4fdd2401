"""A model of the `sentencepiece` library behind the face of `isoform.data.backends.Backend`."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from isoform.data.albert_text import AlbertText
from isoform.errors import TokenizerError

if TYPE_CHECKING:
    import sentencepiece

Prefix = Literal["parts", "text", "none"]

BOUNDARY = "▁"
FRONT = "<unk>"
# ModelProto.normalizer_spec.add_dummy_prefix = false: a field that comes again replaces the earlier one.
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


class SentencePiece:
    """A model of the `sentencepiece` library; ids and texts are the library's own.

    Args:
        model: the content of the ``.model`` file.
        added: atomic tokens beyond the model, by name, found in the text before it is cut.
        pieces: ids by piece where a family numbers the pieces differently from the model; pieces it
            does not list become ``unk``. None: the model's own ids.
        unk: the id of the unknown token in ``pieces``; only read with it.
        albert: ALBERT's rules around the model, as a table of the fields of `AlbertText`; None elsewhere.
        prefix: where the model's word boundary is put though no space stands there: before every part
            between added tokens ("parts", the model's own doing), only where a text begins ("text"), or
            nowhere ("none").
        greedy: added tokens that take the spaces around them along.
    """

    suffix = ".model"

    def __init__(
        self,
        model: bytes,
        added: Mapping[str, int],
        pieces: Mapping[str, int] | None,
        unk: int | None,
        where: str,
        albert: Mapping[str, bool] | None = None,
        prefix: Prefix = "parts",
        greedy: Sequence[str] = (),
    ) -> None:
        """
        Raises:
            TokenizerError: ``model`` is not a SentencePiece model, or an added id is taken.
        """
        import sentencepiece

        self.inner: sentencepiece.SentencePieceProcessor = sentencepiece.SentencePieceProcessor()
        self._prefix: Prefix = prefix
        try:
            self.inner.LoadFromSerializedProto(model if prefix == "parts" else model + NO_DUMMY_PREFIX)
        except Exception:  # whose words name a line of the library's source
            raise TokenizerError(f"{where}: not a SentencePiece model") from None
        self._model, self._added, self._unk = model, dict(added), unk
        self._pieces = None if pieces is None else dict(pieces)
        self._albert = None if albert is None else AlbertText(**albert)
        size = self.inner.get_piece_size()
        own = {self.inner.id_to_piece(i): i for i in range(size)} if pieces is None else self._pieces or {}
        taken = {number: piece for piece, number in own.items()}
        for name, number in added.items():
            if taken.get(number, name) != name:
                raise TokenizerError(
                    f"{where}: id {number} of added token {name!r} is that of {taken[number]!r}"
                )
        self._own, self._names = own, {number: name for name, number in added.items()}
        self._by_id = taken
        names = sorted(added, key=len, reverse=True)
        self._greedy = list(greedy)
        forms = [rf"\s*{re.escape(name)}\s*" if name in greedy else re.escape(name) for name in names]
        self._splitter = re.compile("(" + "|".join(forms) + ")") if names else None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if self._prefix == "text":
            texts = [BOUNDARY + text.replace(BOUNDARY, " ") if text else "" for text in texts]
        elif self._prefix == "none":
            texts = [text.replace(BOUNDARY, " ") for text in texts]
        if self._splitter is None:
            return self._plain(list(texts))
        return [self._split(text) for text in texts]

    def encode_words(self, words: Sequence[str]) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        first: list[int] = []
        # The model puts its own word boundary before each text, so words can be cut one by one.
        for cut in self.encode_batch(words):
            first.append(len(ids) if cut else -1)
            ids += cut
        return ids, first

    def decode(self, ids: Sequence[int]) -> str:
        parts: list[str] = []
        run: list[int] = []
        for number in ids:
            if number in self._names:
                parts += [self._run(run), self._names[number]]
                run = []
            else:
                run.append(number)
        text = "".join([*parts, self._run(run)])
        return text.removeprefix(" ") if self._prefix == "text" else text

    def vocabulary(self) -> dict[str, int]:
        return {**self._own, **self._added}

    def silent(self) -> frozenset[int]:
        controls = [i for i in range(self.inner.get_piece_size()) if self.inner.is_control(i)]
        if self._pieces is None:
            return frozenset(controls)
        names = {self.inner.id_to_piece(i) for i in controls}
        return frozenset(number for piece, number in self._pieces.items() if piece in names)

    def serialise(self) -> bytes:
        return self._model

    def settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {"added": self._added, "pieces": self._pieces, "unk": self._unk}
        # Left out where they are the usual ones, so that digests of earlier artifacts stay what they are.
        if self._albert is not None:
            settings["albert"] = dataclasses.asdict(self._albert)
        if self._prefix != "parts":
            settings["prefix"] = self._prefix
        return {**settings, "greedy": self._greedy} if self._greedy else settings

    def canonical(self) -> bytes:
        return self._model + json.dumps(self.settings(), sort_keys=True, ensure_ascii=False).encode("utf-8")

    def line_ends_cut(self) -> bool:
        return False  # a cut would put a word boundary after it

    def byte_level(self) -> bool:
        return False

    def _plain(self, texts: list[str]) -> list[list[int]]:
        if self._albert is not None:
            assert self._pieces is None

            def pieces_of(text: str) -> list[str]:
                return self.inner.encode(text, out_type=str)

            rows = [self._albert.cut(text, pieces_of) for text in texts]
            return [[self.inner.piece_to_id(piece) for piece in row] for row in rows]
        if self._pieces is None:
            return self.inner.encode(texts, out_type=int) if self._prefix == "parts" else self._bare(texts)
        pieces, unknown = self._pieces, -1 if self._unk is None else self._unk
        cut = self.inner.encode(texts, out_type=str)
        ids = [[pieces.get(piece, unknown) for piece in row] for row in cut]
        if self._unk is None and any(-1 in row for row in ids):
            raise TokenizerError("a piece is not in the vocabulary, which has no unk token")
        return ids

    def _bare(self, texts: list[str]) -> list[list[int]]:
        """Without a boundary of the model's own. It would also strip one that begins a text, so those are
        cut behind other characters."""
        front = len(self.inner.encode(FRONT))
        kept = [FRONT + t if t.startswith((BOUNDARY, " ")) else t for t in texts]
        rows = self.inner.encode(kept, out_type=int)
        return [
            row[front:] if whole is not text else row
            for row, whole, text in zip(rows, kept, texts, strict=True)
        ]

    def _split(self, text: str) -> list[int]:
        assert self._splitter is not None
        ids: list[int] = []
        for i, part in enumerate(self._splitter.split(text)):
            if i % 2:
                if i == 1 and self._prefix != "parts" and [self._own.get(BOUNDARY)] == ids:
                    ids = []  # a boundary alone before an added token is none
                ids.append(self._added[part if part in self._added else part.strip()])
            elif part:
                ids += self._plain([part])[0]
        return ids

    def _run(self, ids: list[int]) -> str:
        if not ids:
            return ""
        if self._pieces is None:
            return self.inner.decode(ids)
        return self.inner.decode([self._by_id[number] for number in ids])
