"""Adapters saved apart from the network they were learnt on (Hu et al. 2021).

``adapter.safetensors``  the factors by projection, and parameters that were learnt whole
``config.json``          the architecture of the adapted network
``adapter.json``         format, the base and its digest, rank, alpha, projections, protocol, provenance
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from isoform.checkpoints.bundle import Bundle
from isoform.checkpoints.probe import inputs
from isoform.checkpoints.transplant import transplant
from isoform.checkpoints.weights import SafetensorsFile, refuse_strangers
from isoform.config import ModelConfig, dumps, parse, read
from isoform.config.base import Count, Frozen, Positive
from isoform.config.files import read_table, write_text
from isoform.config.folders import replaced
from isoform.config.protocol import Protocol
from isoform.errors import ArtifactError, CheckError, ConfigError
from isoform.nn import Transformer, build
from isoform.nn.lora import attach, factors, merge

FORMAT = 1
MARK = "adapter.json"
SEED = 0  # of first values that are all replaced


class Base(Frozen):
    """What adapters were learnt on."""

    path: str
    """Where it was."""
    sha256: str
    """Its `digest`."""


class State(Frozen):
    """What ``adapter.json`` says."""

    format: int
    base: Base
    rank: Count
    """Of the factors."""
    alpha: Positive
    """Of the factors."""
    projections: tuple[str, ...]
    """What has factors."""
    learnt_whole: tuple[str, ...]
    """Parameters that were learnt as they are."""
    protocol: Protocol
    provenance: dict[str, Any]


def is_adapter(path: Path) -> bool:
    """Whether a folder says that it is one."""
    return (path / MARK).is_file()


def digest(model: Transformer) -> str:
    """SHA-256 over names and values of all parameters, in float32."""
    total = hashlib.sha256()
    for name, parameter in model.named_parameters():
        total.update(name.encode())
        total.update(parameter.detach().float().contiguous().cpu().numpy().tobytes())
    return total.hexdigest()


def save_adapter(
    bundle: Bundle,
    folder: Path,
    *,
    base: Path,
    base_digest: str,
    rank: int,
    alpha: float,
    projections: Sequence[str],
    learnt_whole: Sequence[str],
) -> Path:
    """Write the adapters of a network, whole or not at all.

    Args:
        bundle: the network with adapters on it (`isoform.nn.lora.attach`).
        folder: where to.
        base: the checkpoint they were learnt on.
        base_digest: its `digest`.
        rank: of the factors.
        alpha: of the factors.
        projections: what `attach` returned.
        learnt_whole: names of parameters that were learnt as they are, such as a new head's.
    """
    from safetensors.torch import save_file

    named = dict(bundle.model.named_parameters())
    tensors = {**factors(bundle.model), **{name: named[name] for name in learnt_whole}}
    state = State(
        format=FORMAT,
        base=Base(path=str(base.resolve()), sha256=base_digest),
        rank=rank,
        alpha=alpha,
        projections=tuple(projections),
        learnt_whole=tuple(learnt_whole),
        protocol=bundle.protocol,
        provenance=dict(bundle.provenance),
    )
    with replaced(folder, mark=MARK) as new:
        save_file(
            {name: t.detach().float().cpu().contiguous() for name, t in tensors.items()},
            new / "adapter.safetensors",
            metadata={"format": "pt"},
        )
        write_text(new / "config.json", dumps(bundle.config, ".json"))
        write_text(new / MARK, json.dumps(state.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n")
    return folder


def load_adapter(
    folder: Path, base: Bundle, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Bundle:
    """The base with the adapters merged into it: a plain network.

    The merged network is held against the one with adapters on it, to the bit.

    Args:
        folder: what `save_adapter` wrote.
        base: the opened base.
        dtype: what to hold the weights in; default: float32.
        device: where to put the network.

    Raises:
        ArtifactError: another base than the one they were learnt on, or parts that are missing or foreign.
        CheckError: merging changed the function.
    """
    state = read_state(folder)
    found = digest(base.model)
    if found != state.base.sha256:
        raise ArtifactError(
            f"{folder}: learnt on other weights than those of {state.base.path}: their digest is"
            f" {found[:12]}…, {MARK} says {state.base.sha256[:12]}…"
        )
    try:
        config = read(ModelConfig, folder / "config.json")
    except ConfigError as error:
        raise ArtifactError(str(error)) from None
    model = build(config, seed=SEED)
    transplant(base.model, model)
    attach(model, rank=state.rank, alpha=state.alpha, targets=state.projections, seed=SEED)
    named = dict(model.named_parameters())
    if strange := [name for name in state.learnt_whole if name not in named]:
        raise ArtifactError(f"{folder / MARK}: learnt_whole: the network has no parameter {strange[0]!r}")
    places = {**factors(model), **{name: named[name] for name in state.learnt_whole}}
    file = SafetensorsFile(folder / "adapter.safetensors")
    shapes = {name: tuple(p.shape) for name, p in places.items()}
    refuse_strangers(file.path, shapes, {name: file.shape(name) for name in file.names()})
    with torch.no_grad():
        for name, place in places.items():
            place.copy_(file.view(name))
    before = _outputs(model.eval())
    if not all(torch.equal(a, b) for a, b in zip(before, _outputs(merge(model)), strict=True)):
        raise CheckError(f"{folder}: merged into its base, the network gives other numbers")
    bundle = Bundle(model, config, base.tokenizer, base.source_tokenizer, state.protocol, state.provenance)
    return bundle.to(device=device, dtype=dtype)


@torch.inference_mode()
def _outputs(model: Transformer) -> list[torch.Tensor]:
    """What the network makes of the probe's inputs."""
    tokens, source = inputs(model.config)
    found = model(tokens, source=source)
    return [t for t in (found.hidden, found.logits, found.pooled) if t is not None]


def read_state(folder: Path) -> State:
    """The contents of ``adapter.json``.

    Raises:
        ArtifactError: unreadable, of another format, or incomplete.
    """
    path = folder / MARK
    try:
        state = read_table(path)
        if state.get("format") != FORMAT:
            raise ArtifactError(
                f"{path}: format {state.get('format')!r} is unknown; this version reads {FORMAT}"
            )
        return parse(State, state, where=str(path))
    except ConfigError as error:
        raise ArtifactError(str(error)) from None
