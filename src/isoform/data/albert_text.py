"""ALBERT's rules for a text before SentencePiece cuts it, and for its pieces after (its original code)."""

from __future__ import annotations

import dataclasses
import unicodedata
from collections.abc import Callable

BOUNDARY = "▁"


@dataclasses.dataclass(frozen=True)
class AlbertText:
    """The rules of one vocabulary.

    Attributes:
        lowercase: whether letters are made small.
        spaces: whether runs of white space become one space.
        accents: whether combining marks stay.
    """

    lowercase: bool
    spaces: bool
    accents: bool

    def prepared(self, text: str) -> str:
        """The text that is cut."""
        text = text.lower() if self.lowercase else text
        text = " ".join(text.split()) if self.spaces else text
        text = text.replace("``", '"').replace("''", '"')
        if not self.accents:
            text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
        return text.lower() if self.lowercase else text

    def cut(self, text: str, pieces_of: Callable[[str], list[str]]) -> list[str]:
        """The pieces of a text; a comma after a digit is one of its own (``9,9`` is ``9 , 9``)."""
        result: list[str] = []
        for piece in pieces_of(self.prepared(text)):
            if len(piece) < 2 or piece[-1] != "," or not piece[-2].isdigit():
                result.append(piece)
                continue
            parts = pieces_of(piece[:-1].replace(BOUNDARY, ""))
            if piece[0] != BOUNDARY and parts[0][0] == BOUNDARY:
                parts = parts[1:] if parts[0] == BOUNDARY else [parts[0][1:], *parts[1:]]
            result += [*parts, ","]
        return result
