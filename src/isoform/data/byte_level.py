"""Tokens of byte-level vocabularies for people to read: each of their characters is a byte (GPT-2)."""

from __future__ import annotations

import functools


@functools.cache
def _bytes() -> dict[str, int]:
    """The byte of each character: printable Latin-1 for itself, the 68 others for what follows U+0100."""
    itself = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in itself]
    return {**{chr(b): b for b in itself}, **{chr(256 + i): b for i, b in enumerate(others)}}


def written_out(token: str) -> str:
    """The text that a token's bytes are, those that are no whole character as ``<e4>``.

    A token with a character that stands for no byte (an added token) is given back as it is.
    """
    table = _bytes()
    if any(char not in table for char in token):
        return token
    text = bytes(table[char] for char in token).decode("utf-8", errors="surrogateescape")
    return "".join(f"<{ord(c) - 0xDC00:02x}>" if 0xDC80 <= ord(c) <= 0xDCFF else c for c in text)
