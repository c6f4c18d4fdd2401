"""Tiny networks with broken symmetries and ragged batches, for tests of the network.

Every bias, gain and padding row is random, head counts are no powers of two, widths odd where they may be.
"""

from __future__ import annotations

import inspect
from typing import Literal

import torch
from torch import nn

import isoform as iso
from isoform import config
from isoform.config import ModelConfig
from isoform.config.presets import PRESETS

VOCAB = 23
SMALL: dict[str, object] = {
    "vocab_size": VOCAB,
    "d_model": 24,
    "n_heads": 6,
    "ffn_width": 17,
    "n_layers": 2,
    "max_positions": 40,
    "dropout": 0.0,
    "head_width": 4,
    "n_kv_heads": 2,
    "embedding_width": 10,
    "window": 4,
    "n_experts": 4,
    "top_k": 2,
    "n_encoder_layers": 2,
    "n_decoder_layers": 2,
}
OWN: dict[str, dict[str, object]] = {
    "falcon": {"n_kv_heads": 1},
    "phi": {"n_heads": 3},
    "gpt_neox": {"n_heads": 3},
}
LENGTHS = (9, 4, 7)


def preset(name: str, **settings: object) -> ModelConfig:
    """A preset at a tiny size."""
    make = PRESETS[name]
    known = inspect.signature(make).parameters
    wanted = {**SMALL, **OWN.get(name, {}), **settings}
    return make(**{key: value for key, value in wanted.items() if key in known or key in settings})


def shake(module: nn.Module, seed: int = 0) -> nn.Module:
    """Give every parameter a random value, biases and gains too, in float64."""
    generator = torch.Generator().manual_seed(seed)
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3 + 0.1
            )
    return module


def network(cfg: ModelConfig, seed: int = 0) -> iso.nn.Transformer:
    """The network of a configuration with random parameters, in float64 and eval mode."""
    model = shake(iso.build(cfg), seed)
    assert isinstance(model, iso.nn.Transformer)
    return model.eval()


def rows(seed: int = 1, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """Random token ids; 0 is left to the padding."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def batch(
    seed: int = 1, side: Literal["right", "left"] = "right", lengths: tuple[int, ...] = LENGTHS
) -> iso.Tokens:
    """A ragged batch, padded on one side."""
    return iso.Tokens.from_lists(rows(seed, lengths), pad_id=0, side=side)


def inputs(cfg: ModelConfig, side: Literal["right", "left"] = "right") -> dict[str, iso.Tokens]:
    """What a network of this configuration is called with."""
    tokens = batch(1, side)
    if cfg.stack.visibility == "prefix":
        tokens = iso.Tokens(tokens.ids, tokens.real, prefix=torch.tensor([3, 2, 4]))
    given = {"tokens": tokens}
    if cfg.source is not None:
        given["source"] = batch(2, side, (5, 8, 3))
    return given


def attention(**settings: object) -> config.Attention:
    """An attention configuration: 6 heads of 4 channels on 2 key heads, every bias, no positions."""
    base: dict[str, object] = {
        "n_heads": 6,
        "n_kv_heads": 2,
        "head_width": 4,
        "scale": "inverse_sqrt_head_width",
        "bias": config.AttentionBias(query=True, key=True, value=True, output=True),
        "positions": config.NoPositions(),
    }
    return config.Attention(**{**base, **settings})  # pyright: ignore[reportArgumentType]
