"""CTranslate2 folders: binaries of versions 2 and 6 in, version 6 out through the engine's own classes."""

from __future__ import annotations

from isoform.checkpoints.ctranslate2.reading import is_ctranslate2, load, opened
from isoform.checkpoints.ctranslate2.writing import export

__all__ = ["export", "is_ctranslate2", "load", "opened"]
