"""Isoform: build, train, port and prove Transformer networks.

Two Transformers with the same tensor shapes are not the same function. Here the architecture is explicit
data, every choice that changes the function has a name, and every claim is checked by a command.

Names are loaded when first used, so ``import isoform`` costs little more than ``import torch``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isoform import config as config
    from isoform import verify as verify
    from isoform.checkpoints import Bundle as Bundle
    from isoform.checkpoints import export as export
    from isoform.checkpoints import load as load
    from isoform.config import ModelConfig as ModelConfig
    from isoform.config import presets as presets
    from isoform.errors import IsoformError as IsoformError
    from isoform.generation import Beam as Beam
    from isoform.generation import Greedy as Greedy
    from isoform.generation import Sample as Sample
    from isoform.generation import generate as generate
    from isoform.nn import Output as Output
    from isoform.nn import build as build
    from isoform.nn import capture as capture
    from isoform.optimized import optimize as optimize
    from isoform.tokens import Tokens as Tokens

__version__ = "0.1.0"

_HOME = {
    "Beam": "isoform.generation",
    "Bundle": "isoform.checkpoints",
    "Greedy": "isoform.generation",
    "IsoformError": "isoform.errors",
    "ModelConfig": "isoform.config",
    "Output": "isoform.nn",
    "Sample": "isoform.generation",
    "Tokens": "isoform.tokens",
    "build": "isoform.nn",
    "capture": "isoform.nn",
    "export": "isoform.checkpoints",
    "generate": "isoform.generation",
    "load": "isoform.checkpoints",
    "optimize": "isoform.optimized",
    "presets": "isoform.config",
}
_MODULES = (
    *("checkpoints", "config", "cost", "data", "errors", "evaluation", "generation", "nn", "report"),
    *("training", "verify", "visibility"),
)

__all__ = [
    "Beam",
    "Bundle",
    "Greedy",
    "IsoformError",
    "ModelConfig",
    "Output",
    "Sample",
    "Tokens",
    "__version__",
]
__all__ += ["build", "capture", "export", "generate", "load", "optimize", "presets", *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"isoform.{name}")
    raise AttributeError(f"module 'isoform' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
