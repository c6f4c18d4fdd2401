"""GGUF files of the Llama family, plain or quantised, read with the `gguf` library."""

from __future__ import annotations

from isoform.checkpoints.gguf.reading import is_gguf, load, opened

__all__ = ["is_gguf", "load", "opened"]
