"""Going on from trained weights: what is taken along, what is new, and adapters on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isoform.checkpoints.transplant import Transplant, transplant
from isoform.config import ModelConfig
from isoform.config.protocol import Protocol
from isoform.data.config import DataConfig
from isoform.data.parts import Task
from isoform.data.vocabularies import Tokenizers
from isoform.errors import ConfigError
from isoform.nn import Transformer, build
from isoform.nn.forms import form_of
from isoform.nn.lora import adapted, attach, factors, projections
from isoform.training.config import Pretrained
from isoform.training.optimizer import matching
from isoform.training.protocol import protocol_of
from isoform.training.settings import Training

if TYPE_CHECKING:
    from isoform.checkpoints import Bundle


@dataclasses.dataclass(frozen=True, eq=False)
class Start:
    """What a run goes on from.

    Attributes:
        path: of the checkpoint.
        bundle: the checkpoint, opened.
        tokenizers: its tokenizers, with what its protocol puts around texts.
        transplant: which parameters were taken.
        digest: of its weights.
    """

    path: Path
    bundle: Bundle
    tokenizers: Tokenizers
    transplant: Transplant = dataclasses.field(default_factory=lambda: Transplant((), (), ()))
    digest: str = ""

    @property
    def start_id(self) -> int | None:
        """What its decoder reads first; None where it has nothing of the kind."""
        start = self.bundle.protocol.start
        return start[-1] if start else None

    def protocol(self, task: Task, tokenizers: Tokenizers) -> Protocol:
        """The checkpoint's own, unless another head makes another use of it."""
        return protocol_of(task, tokenizers) if self.transplant.new else self.bundle.protocol

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the artifact's provenance."""
        return {
            "checkpoint": str(self.path),
            "sha256": self.digest,
            "new": list(self.transplant.new),
            "dropped": list(self.transplant.dropped),
        }


def open_start(model: Pretrained, data: DataConfig, base: Path) -> Start:
    """Open the checkpoint.

    Raises:
        IsoformError: it cannot be opened, is packed for inference, or has no tokenizer.
    """
    import torch

    from isoform.checkpoints import load
    from isoform.evaluation.files import tokenizers_for

    path = base / model.checkpoint
    bundle = load(path)
    if form_of(bundle.model) is not None:
        raise ConfigError(f"{path}: its weights are {form_of(bundle.model)}; start from the original")
    bundle.to(dtype=torch.float32)
    return Start(path, bundle, tokenizers_for(bundle, data))


def begin_from(start: Start, model: Pretrained, seed: int, labels: int) -> tuple[Start, Transformer]:
    """The network as the run begins: the checkpoint's weights, and a new head where one is asked for.

    Args:
        start: the opened checkpoint.
        model: the run file's section.
        seed: of the new head.
        labels: how many the data have.

    Raises:
        ConfigError: changes that do not make a network.
        ArtifactError: changes that leave no place for the checkpoint's weights.
    """
    from isoform.checkpoints.adapter import digest

    config: ModelConfig = model.expand(start.bundle.config, labels)
    network = build(config, seed=seed)
    found = transplant(start.bundle.model, network)
    return dataclasses.replace(start, transplant=found, digest=digest(start.bundle.model)), network


def adapt(model: Transformer, settings: Training) -> None:
    """Put the adapters that the settings ask for on a network that has none yet, in place.

    Raises:
        ConfigError: patterns that nothing has.
    """
    lora = settings.lora
    if lora is None or adapted(model):
        return
    # Names first: with adapters on them, parameters have other ones.
    named = dict(model.named_parameters())
    whole = [n for pattern in lora.learn_whole for n in matching(pattern, list(named), "training.lora")]
    attach(model, rank=lora.rank, alpha=lora.alpha, targets=lora.targets, seed=settings.seed)
    for name in whole:
        named[name].requires_grad_(True)


def refuse_idle(new: Sequence[str], model: Transformer) -> None:
    """Random weights have to be learnt.

    Raises:
        ConfigError: a new parameter is kept as it is.
    """
    named = dict(model.named_parameters())
    for name in new:
        if name not in named or not named[name].requires_grad:
            raise ConfigError(
                f"training.lora: {name} is new and would stay random; add it to learn_whole (head.*)"
            )


def save_adapter(bundle: Bundle, folder: Path, start: Start, settings: Training) -> None:
    """Write what was learnt beside the checkpoint's weights."""
    from isoform.checkpoints import adapter

    lora = settings.lora
    assert lora is not None
    named, learnt = bundle.model.named_parameters(), factors(bundle.model)
    adapter.save_adapter(
        bundle,
        folder,
        base=start.path,
        base_digest=start.digest,
        rank=lora.rank,
        alpha=lora.alpha,
        projections=[name for name, _ in projections(bundle.model) if f"{name}.up" in learnt],
        learnt_whole=[n for n, p in named if p.requires_grad and ".parametrizations." not in n],
    )
