"""The errors Isoform raises on purpose. Each is one line: what is wrong, where, what was expected."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class IsoformError(Exception):
    """Base of all deliberate errors. The command line prints its one line and exits with status 2."""


class ConfigError(IsoformError):
    """A configuration that is unknown, contradictory or of the wrong type."""


class ShapeError(IsoformError, ValueError):
    """Two shapes that should fit and do not (R1); the message names both."""


class DataError(IsoformError):
    """Text, pairs or files that cannot be used as asked."""


class TokenizerError(IsoformError):
    """A tokenizer that is missing, foreign or has clashing special ids."""


class SupervisionError(IsoformError):
    """Labels that leak or are not there (R23, R30)."""


class ArtifactError(IsoformError):
    """An artifact or checkpoint with missing, extra, misshaped or foreign parts (R37)."""


class CheckError(IsoformError):
    """A check that was demanded and does not hold (R38)."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest known name, else the list of known names."""
    names = list(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(sorted(names))}" if names else ""
