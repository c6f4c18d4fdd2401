"""A network with everything that is needed to use it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from isoform.config import ModelConfig
from isoform.config.protocol import Protocol
from isoform.nn import Transformer

if TYPE_CHECKING:
    from isoform.checkpoints.probe import ProbeReport
    from isoform.data import Tokenizer
    from isoform.generation import Search


@dataclasses.dataclass(frozen=True, eq=False)
class Bundle:
    """A network, its configuration, its vocabularies and its token protocol (R37).

    Attributes:
        model: the network.
        config: the architecture it was built from.
        tokenizer: of the only stream, or of the target side; None where a checkpoint came without one.
        source_tokenizer: of the source side of an encoder–decoder; the same object as ``tokenizer`` where
            both sides share one vocabulary.
        protocol: what starts, ends and surrounds the tokens.
        provenance: where weights, data and metrics come from; plain values that JSON can hold.
        report: figures of the check that was run on loading, if one was.
    """

    model: Transformer
    config: ModelConfig
    tokenizer: Tokenizer | None
    source_tokenizer: Tokenizer | None
    protocol: Protocol
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    report: ProbeReport | None = None

    def save(self, folder: str | Path) -> Path:
        """Write the artifact, whole or not at all; an earlier one of that name is replaced.

        Raises:
            ArtifactError: the parts do not fit together, or the folder holds something else.
        """
        from isoform.checkpoints.artifact import save

        return save(self, Path(folder))

    def generate(
        self, texts: Sequence[str], *, search: Search | None = None, max_new_tokens: int | None = None
    ) -> list[str]:
        """Continue, answer or translate texts; see `isoform.generation.texts.generate_texts`."""
        from isoform.generation.texts import generate_texts

        return generate_texts(self, texts, search=search, max_new_tokens=max_new_tokens)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Bundle:
        """Move the network, in place, to a device or a floating type. Returns the bundle."""
        self.model.to(device=device, dtype=dtype)
        return self
