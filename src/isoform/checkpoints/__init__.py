"""Artifacts and checkpoints: save, load, import and export whole networks."""

from __future__ import annotations

from isoform.checkpoints.bundle import Bundle
from isoform.checkpoints.loading import export, load
from isoform.checkpoints.probe import ProbeReport

__all__ = ["Bundle", "ProbeReport", "export", "load"]
