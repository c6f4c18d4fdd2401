"""The networks that are measured, each as a bundle of ours and as the same function in a peer."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import torch

import isoform as iso
from isoform.checkpoints import Bundle
from isoform.config.protocol import Protocol

EOS, PAD, START = 1, 0, 2


@dataclasses.dataclass(frozen=True)
class Shape:
    """A network's size; ``layers`` on each side of an encoder–decoder."""

    name: str
    vocab: int
    d_model: int
    heads: int
    layers: int


GPT2_SMALL = Shape("GPT-2 small shape", 50_257, 768, 12, 12)
SIX = Shape("decoder 6×256", 8_000, 256, 4, 6)
ODD = Shape("decoder 5×320, vocabulary 12,345", 12_345, 320, 5, 5)
TRANSLATION = Shape("translation 6+6×512", 32_000, 512, 8, 6)
SMALL_TRANSLATION = Shape("translation 3+3×256", 8_000, 256, 4, 3)


def decoder(shape: Shape, positions: int = 1024, dropout: float = 0.0) -> Bundle:
    """GPT-2 of that shape with random weights."""
    cfg = iso.presets.gpt2(
        shape.vocab,
        d_model=shape.d_model,
        n_heads=shape.heads,
        ffn_width=4 * shape.d_model,
        n_layers=shape.layers,
        max_positions=positions,
        dropout=dropout,
    )
    return _bundle(cfg, Protocol(pad_id=PAD, eos_ids=(EOS,), start=(START,)))


def translator(shape: Shape) -> Bundle:
    """Marian of that shape with random weights."""
    cfg = iso.presets.marian(
        shape.vocab,
        d_model=shape.d_model,
        n_heads=shape.heads,
        ffn_width=4 * shape.d_model,
        n_layers=shape.layers,
        dropout=0.0,
    )
    return _bundle(cfg, Protocol(pad_id=PAD, eos_ids=(EOS,), start=(PAD,)))


def _bundle(cfg: iso.ModelConfig, protocol: Protocol) -> Bundle:
    model = iso.build(cfg, seed=0).eval()
    with torch.no_grad():
        for p in model.parameters():  # so that choices are not near ties
            if p.dim() > 1:
                p.mul_(2.0)
    return Bundle(model, cfg, None, None, protocol)


def in_transformers(bundle: Bundle) -> Any:
    """The same function in transformers, through our own export."""
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        path = iso.export(bundle, Path(folder) / "hf", to="hf")
        kind = (
            transformers.AutoModelForCausalLM
            if bundle.config.source is None
            else transformers.AutoModelForSeq2SeqLM
        )
        return kind.from_pretrained(path, dtype=torch.float32).eval()


def prompts(bundle: Bundle, batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random ids that are no special token."""
    table = bundle.config.source or bundle.config.embedding
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, table.vocab_size, (batch, length), generator=generator)
