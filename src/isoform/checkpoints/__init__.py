"""Artifacts and checkpoints: save, load, import and export whole networks."""

from __future__ import annotations

from isoform.checkpoints.bundle import Bundle
from isoform.checkpoints.loading import export, load
from isoform.checkpoints.probe import ProbeReport
from isoform.checkpoints.torch_nn import from_torch, to_torch

__all__ = ["Bundle", "ProbeReport", "export", "from_torch", "load", "to_torch"]
