"""Pairs from a translation memory (TMX 1.4)."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

from isoform.data.files import read_bytes
from isoform.data.records import Pair
from isoform.errors import DataError, did_you_mean

# TMX 1.4 has xml:lang; 1.1 had a plain lang.
LANGUAGE_ATTRIBUTES = ("{http://www.w3.org/XML/1998/namespace}lang", "lang")
# Content of these is markup of the original file, not text (TMX 1.4, §3.3); hi and sub hold text.
MARKUP = ("bpt", "ept", "it", "ph", "ut")


def read_tmx(path: Path, source: str, target: str) -> Iterator[tuple[int, Pair]]:
    """Units that have both languages; the number is that of the unit in the file, from 1.

    A code asked for also matches its regional variants (``"en"`` matches ``"en-GB"``), the exact one
    first. Units without one of the two languages are passed over, as memories of several languages need.

    Raises:
        DataError: not XML, or no unit with both languages (those found are named).
    """
    seen: set[str] = set()
    found = False
    for number, unit in enumerate(_units(path), 1):
        texts = {language: _text(segment) for language, segment in _variants(unit)}
        seen.update(texts)
        left, right = _pick(texts, source), _pick(texts, target)
        if left is not None and right is not None:
            found = True
            yield number, Pair(left, right)
    if not found:
        raise DataError(f"{path}: no unit has both {source!r} and {target!r}{_known(source, target, seen)}")


def _units(path: Path) -> Iterator[ElementTree.Element]:
    try:
        for _, element in ElementTree.iterparse(io.BytesIO(read_bytes(path))):
            if _name(element) == "tu":
                yield element
                element.clear()
    except ElementTree.ParseError as error:
        raise DataError(f"{path}, line {error.position[0]}: not XML: {error.msg}") from None
    except (LookupError, ValueError) as error:  # what it declares as its encoding
        raise DataError(f"{path}: {error}; expected UTF-8, UTF-16 or a single-byte encoding") from None


def _variants(unit: ElementTree.Element) -> Iterator[tuple[str, ElementTree.Element]]:
    for variant in unit:
        language = next((variant.get(name) for name in LANGUAGE_ATTRIBUTES if variant.get(name)), None)
        segment = next((child for child in variant if _name(child) == "seg"), None)
        if _name(variant) == "tuv" and language is not None and segment is not None:
            yield language.lower(), segment


def _text(element: ElementTree.Element) -> str:
    parts = [element.text or ""]
    for child in element:
        if _name(child) not in MARKUP:
            parts.append(_text(child))
        parts.append(child.tail or "")
    return "".join(parts)


def _pick(texts: dict[str, str], language: str) -> str | None:
    wanted = language.lower()
    if wanted in texts:
        return texts[wanted]
    return next((text for code, text in texts.items() if code.split("-")[0] == wanted), None)


def _known(source: str, target: str, seen: set[str]) -> str:
    absent = next((w for w in (source, target) if _pick(dict.fromkeys(seen, ""), w) is None), source)
    return did_you_mean(absent, sorted(seen))


def _name(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]
