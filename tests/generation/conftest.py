"""Small networks with every symmetry broken."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from isoform import config as c
from isoform.checkpoints import Bundle
from isoform.config.protocol import Protocol
from isoform.data.tokenizer import Tokenizer
from isoform.data.tokenizer_config import Characters
from isoform.nn import Transformer, build
from isoform.tokens import Tokens

VOCAB, SOURCE_VOCAB = 17, 11
ROTARY = {"theta": 50.0, "precision": "float64"}

POSITIONS: dict[str, tuple[c.AddedPositions, c.AttentionPositions]] = {
    "none": (c.NoPositions(), c.NoPositions()),
    "sinusoidal-interleaved": (
        c.Sinusoidal(layout="interleaved", spacing="half_width", offset=3, base=100.0, precision="float64"),
        c.NoPositions(),
    ),
    "sinusoidal-concatenated": (
        c.Sinusoidal(
            layout="concatenated", spacing="half_width_minus_one", offset=1, base=100.0, precision="float64"
        ),
        c.NoPositions(),
    ),
    "learned": (c.Learned(max_positions=20, offset=2), c.NoPositions()),
    "rotary-half": (c.NoPositions(), c.Rotary(layout="half", width=8, **ROTARY)),
    "rotary-interleaved": (c.NoPositions(), c.Rotary(layout="interleaved", width=8, **ROTARY)),
    "rotary-partial": (c.NoPositions(), c.Rotary(layout="half", width=4, **ROTARY)),
    "rotary-linear": (
        c.NoPositions(),
        c.Rotary(layout="half", width=8, scaling=c.LinearScaling(factor=2.5), **ROTARY),
    ),
    "rotary-dynamic": (
        c.NoPositions(),
        c.Rotary(
            layout="half", width=8, scaling=c.DynamicNtkScaling(factor=2.0, original_length=7), **ROTARY
        ),
    ),
    "rotary-llama3": (
        c.NoPositions(),
        c.Rotary(
            layout="interleaved",
            width=8,
            scaling=c.Llama3Scaling(
                factor=4.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=32
            ),
            **ROTARY,
        ),
    ),
    "rotary-yarn": (
        c.NoPositions(),
        c.Rotary(
            layout="half",
            width=8,
            scaling=c.YarnScaling(
                factor=4.0,
                original_length=16,
                beta_fast=32.0,
                beta_slow=1.0,
                attention_factor=1.14,
                truncate=True,
            ),
            **ROTARY,
        ),
    ),
    "alibi": (c.NoPositions(), c.Alibi()),
    "relative-buckets": (
        c.NoPositions(),
        c.RelativeBuckets(n_buckets=6, max_distance=9, bidirectional=False),
    ),
}


def configuration(
    positions: str = "rotary-half",
    *,
    kv: int = 2,
    window: int | None = None,
    structure: str = "causal",
    vocab: int = VOCAB,
) -> c.ModelConfig:
    """Two layers of six heads, 24 channels, everything with a bias."""
    added, attended = POSITIONS[positions]
    norm = c.Norm(kind="layer", eps=1e-5, bias=True)

    def attention(inside: c.AttentionPositions, reach: int | None, bidirectional: bool) -> c.Attention:
        if isinstance(inside, c.RelativeBuckets):
            inside = inside.model_copy(update={"bidirectional": bidirectional})
        return c.Attention(
            n_heads=6,
            n_kv_heads=kv,
            head_width=8,
            scale="inverse_sqrt_head_width",
            bias=c.AttentionBias(query=True, key=True, value=True, output=True),
            positions=inside,
            window=reach,
        )

    def stack(visibility: str, cross: bool) -> c.Stack:
        layer = c.Layer(
            placement="pre",
            residual="sequential",
            norm=norm,
            attention=attention(attended, window, visibility == "bidirectional"),
            cross_attention=attention(c.NoPositions(), None, False) if cross else None,
            feed_forward=c.TwoLayer(width=20, activation="gelu", bias_up=True, bias_down=True),
        )
        return c.Stack(n_layers=2, visibility=visibility, layer=layer, final_norm=norm)

    both = structure == "encoder-decoder"
    return c.ModelConfig(
        d_model=24,
        embedding=c.Embedding(vocabulary="target", vocab_size=vocab, width=24, positions=added),
        source=c.Embedding(vocabulary="source", vocab_size=SOURCE_VOCAB, width=24, positions=added)
        if both
        else None,
        encoder=stack("bidirectional", False) if both else None,
        decoder=stack("prefix" if structure == "prefix" else "causal", both),
        head=c.TokenHead(tied=False, bias=True),
    )


def network(cfg: c.ModelConfig, *, seed: int = 1, dtype: torch.dtype = torch.float64) -> Transformer:
    """Every parameter uniform about zero, or about one where it starts there: alike to the last bit on every
    machine, as normal ones are not, and no bias, gain or pad row at its start."""
    model = build(cfg, seed=seed).to(dtype)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.rand(parameter.shape, generator=noise, dtype=torch.float64)
            parameter.copy_(parameter.mean().round() + 1.2 * drawn - 0.6)
    return model.eval()


PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5]]
SOURCES = [[1, 2], [3, 4, 5, 6, 2], [7, 7, 8]]


def prompts(structure: str = "causal", side: str = "right") -> tuple[Tokens, Tokens | None]:
    """Ragged prompts, and sources of other lengths for an encoder–decoder."""
    tokens = Tokens.from_lists(PROMPTS, pad_id=0, side=side)
    if structure == "prefix":
        tokens = Tokens(tokens.ids, tokens.real, prefix=torch.tensor([3, 2, 1]), layout=tokens.layout)
    source = Tokens.from_lists(SOURCES, pad_id=0, side=side) if structure == "encoder-decoder" else None
    return tokens, source


@pytest.fixture(name="configuration")
def _configuration() -> Callable[..., c.ModelConfig]:
    return configuration


@pytest.fixture(name="network")
def _network() -> Callable[..., Transformer]:
    return network


@pytest.fixture(name="prompts")
def _prompts() -> Callable[..., tuple[Tokens, Tokens | None]]:
    return prompts


LETTERS = "abcdefgh "


def bundle(structure: str = "encoder-decoder", positions: str = "rotary-half", **protocol: object) -> Bundle:
    """A network that reads and writes letters. BOS starts the decoder, EOS ends both sides."""
    tokenizer = Tokenizer.train(Characters(), [LETTERS], where="letters")
    special = tokenizer.special
    size = tokenizer.vocab_size
    cfg = configuration(positions, structure=structure, vocab=size)
    if cfg.source is not None:
        cfg = cfg.model_copy(update={"source": cfg.source.model_copy(update={"vocab_size": size})})
    settings: dict[str, object] = {
        "pad_id": special.pad,
        "eos_ids": (special.eos,),
        "start": (special.bos,),
        "source_suffix": (special.eos,) if structure == "encoder-decoder" else (),
    }
    return Bundle(network(cfg, seed=3), cfg, tokenizer, tokenizer, Protocol(**{**settings, **protocol}))


@pytest.fixture(name="bundle")
def _bundle() -> Callable[..., Bundle]:
    return bundle
