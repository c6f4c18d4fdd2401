"""Who may read whom in a network, as the network itself has it, on a few positions (R21)."""

from __future__ import annotations

import dataclasses

from isoform.config import ModelConfig, Stack
from isoform.nn.stack import CROSS, RULES
from isoform.visibility import Places, Window


@dataclasses.dataclass(frozen=True)
class Grid:
    """One visibility, on a few real positions without padding.

    Args:
        stack: "encoder" or "decoder".
        reads: "itself", or "source" for cross-attention.
        layers: the layers that have it.
        rule: its name in the configuration; for cross-attention "every source position".
        prefix: length of the condition, for a prefix decoder.
        window: positions in reach, where that is limited.
        allowed: ``[queries, keys]`` True = may read.
    """

    stack: str
    reads: str
    layers: tuple[int, ...]
    rule: str
    prefix: int | None
    window: int | None
    allowed: list[list[bool]]


def grids(config: ModelConfig, *, length: int = 6, source_length: int = 5, prefix: int = 2) -> list[Grid]:
    """Every visibility there is in a network, each once.

    Args:
        config: the network.
        length: positions of a stack's own stream.
        source_length: positions of the source; both the encoder's stream and the decoder's keys.
        prefix: length of the condition shown for a prefix decoder.
    """
    found: list[Grid] = []
    both = config.encoder is not None and config.decoder is not None
    for name, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        if stack is not None:
            found += _own(name, stack, source_length if both and name == "encoder" else length, prefix)
    if both and config.decoder is not None:
        layers = tuple(range(config.decoder.n_layers))
        matrix = CROSS.on(length, source_length).matrix[0].tolist()
        found.append(Grid("decoder", "source", layers, "every source position", None, None, matrix))
    return found


def _own(name: str, stack: Stack, length: int, prefix: int) -> list[Grid]:
    by_window: dict[int | None, list[int]] = {}
    for i, layer in enumerate(stack.layers()):
        by_window.setdefault(layer.attention.window, []).append(i)
    condition = prefix if stack.visibility == "prefix" else None
    places = Places.range(length, prefix=condition)
    found: list[Grid] = []
    for window, layers in by_window.items():
        rule = RULES[stack.visibility]
        if window is not None:
            rule = rule & Window(window, "both" if stack.visibility == "bidirectional" else "past")
        matrix = rule.on(places).matrix[0].tolist()
        found.append(Grid(name, "itself", tuple(layers), stack.visibility, condition, window, matrix))
    return found
