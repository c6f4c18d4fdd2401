"""Small trained-looking networks of every kind, and data for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from isoform import config as c
from isoform.checkpoints import Bundle
from isoform.config.protocol import Protocol
from isoform.data.tokenizer import Tokenizer
from isoform.data.tokenizer_config import Characters
from isoform.nn import build

LETTERS = "abcdefgh "


def bundle(kind: str, *, labels: tuple[str, ...] = (), max_positions: int = 40) -> Bundle:
    """A network for ``kind``: pairs, prefix, causal, labels or tags; weights far from their first values."""
    tokenizer = Tokenizer.train(Characters(), [LETTERS], where="letters")
    special, size = tokenizer.special, tokenizer.vocab_size
    norm = c.Norm(kind="layer", eps=1e-5, bias=True)

    def attention() -> c.Attention:
        bias = c.AttentionBias(query=True, key=True, value=True, output=True)
        none = c.NoPositions()
        return c.Attention(
            n_heads=2, n_kv_heads=1, head_width=8, scale="inverse_sqrt_head_width", bias=bias, positions=none
        )

    def stack(visibility: str, cross: bool = False) -> c.Stack:
        layer = c.Layer(
            placement="pre",
            residual="sequential",
            norm=norm,
            attention=attention(),
            cross_attention=attention() if cross else None,
            feed_forward=c.TwoLayer(width=20, activation="gelu", bias_up=True, bias_down=True),
        )
        return c.Stack(n_layers=1, visibility=visibility, layer=layer, final_norm=norm)

    def embedding() -> c.Embedding:
        positions = c.Learned(max_positions=max_positions, offset=0)
        return c.Embedding(vocabulary="letters", vocab_size=size, width=16, positions=positions)

    head: c.Head = c.TokenHead(tied=False, bias=True)
    if kind == "labels":
        head = c.SequenceHead(n_labels=len(labels), pooling="mean", pooler=None, bias=True)
    if kind == "tags":
        head = c.TaggingHead(n_labels=len(labels), bias=True)
    encodes = kind in ("pairs", "labels", "tags")
    cfg = c.ModelConfig(
        d_model=16,
        embedding=embedding(),
        source=embedding() if kind == "pairs" else None,
        encoder=stack("bidirectional") if encodes else None,
        decoder={"pairs": stack("causal", True), "prefix": stack("prefix"), "causal": stack("causal")}.get(
            kind
        ),
        head=head,
    )
    model = build(cfg, seed=2).double()
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.4 * torch.randn(parameter.shape, generator=noise, dtype=torch.float64)
    around = {"pairs": ((), (special.eos,)), "labels": ((special.bos,), (special.eos,))}
    before, after = around.get("labels" if kind == "tags" else kind, ((), ()))
    protocol = Protocol(
        pad_id=special.pad,
        eos_ids=(special.eos,),
        start=(special.bos,) if kind in ("pairs", "prefix", "causal") else (),
        source_prefix=before,
        source_suffix=after,
    )
    return Bundle(model, cfg, tokenizer, tokenizer, protocol, {"labels": list(labels)})


@pytest.fixture(name="bundle")
def _bundle() -> Callable[..., Bundle]:
    return bundle


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    """Write a file and give its path."""

    def made(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return made
