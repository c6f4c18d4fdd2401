"""The shared random configurations with every width multiplied, so that no small term hides a large one."""

from __future__ import annotations

from typing import Any

from isoform.config import ModelConfig

WIDTHS = ("d_model", "width", "head_width", "vocab_size", "max_positions", "window")


def enlarge(config: ModelConfig, factor: int, *, dropout: bool = True) -> ModelConfig:
    """The same architecture, ``factor`` times as wide.

    Args:
        config: any configuration.
        factor: what widths, vocabulary, positions and windows are multiplied by.
        dropout: False takes every dropout out.
    """

    def grow(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: _scaled(key, value, factor, dropout, grow) for key, value in node.items()}
        return [grow(item) for item in node] if isinstance(node, list | tuple) else node

    return ModelConfig.model_validate(grow(config.model_dump()))


def _scaled(key: str, value: Any, factor: int, dropout: bool, grow: Any) -> Any:
    if key in WIDTHS and value is not None:
        return value * factor
    if "dropout" in key and isinstance(value, float):
        return value if dropout else 0.0
    return grow(value)
