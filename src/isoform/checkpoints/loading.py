"""One entry for everything that can be opened."""

from __future__ import annotations

from pathlib import Path

import torch

from isoform.checkpoints import artifact
from isoform.checkpoints.bundle import Bundle


def load(
    path: str | Path,
    *,
    check: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Bundle:
    """Open an artifact. See `isoform.checkpoints.artifact.load`."""
    return artifact.load(Path(path), check=check, dtype=dtype, device=device)
