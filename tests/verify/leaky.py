"""A small decoder of its own, with a switch for every promise that an audit should find broken."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Leaky(nn.Module):
    """Causal decoder with learned positions and a tied head; ``fault`` names what is wrong with it."""

    def __init__(
        self, fault: str = "", *, vocab: int = 29, d: int = 16, heads: int = 4, layers: int = 2
    ) -> None:
        super().__init__()
        self.fault, self.heads = fault, heads
        self.table = nn.Embedding(vocab, d)
        self.places = nn.Embedding(64, d)
        self.blocks = nn.ModuleList(Block(d, heads, fault, i) for i in range(layers))
        self.norm = nn.LayerNorm(d, eps=0.0 if fault == "norm-eps" else 1e-5)
        self.head = nn.Linear(d, vocab, bias=False)
        if fault != "untied":
            self.head.weight = self.table.weight
        self.drop = 0.3 if fault in ("dropout-mode", "dropout-off") else 0.0
        self.dropout = nn.Dropout(self.drop)
        self.config = SimpleNamespace(tie_word_embeddings=True, vocab_size=vocab, is_decoder=True)

    def forward(
        self, ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        batch, length = ids.shape
        real = torch.ones_like(ids) if attention_mask is None else attention_mask
        positions = (real.cumsum(-1) - 1).clamp(min=0)
        if self.fault == "position-padding":
            positions = torch.arange(length).expand(batch, -1)
        x = self.table(ids) + self.places(positions)
        if self.fault == "batch-mixing":
            x = x + x.mean(0, keepdim=True)
        if self.fault == "dropout-mode":
            x = F.dropout(x, self.drop, True)
        elif self.fault != "dropout-off":
            x = self.dropout(x)
        for block in self.blocks:
            x = block(x, real.bool())
        logits = self.head(self.norm(x))
        if self.fault == "path-difference" and not torch.is_grad_enabled():
            logits = logits * 1.01
        out = {"logits": logits}
        if labels is not None:
            out["loss"] = self.loss(logits, labels)
        return out

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        shift = {"double-shift": 2, "no-shift": 0}.get(self.fault, 1)
        logits, labels = logits[:, : labels.shape[1] - shift], labels[:, shift:]
        losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
        kept = (labels != -100).sum(-1)
        if self.fault == "mean-of-means":
            return (losses.sum(-1) / kept.clamp(min=1)).mean()
        return losses.sum() / kept.sum()


class Block(nn.Module):
    def __init__(self, d: int, heads: int, fault: str, index: int) -> None:
        super().__init__()
        self.fault, self.index, self.heads = fault, index, heads
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        batch, length, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(d // self.heads)
        allowed = torch.ones(length, length, dtype=torch.bool).tril()
        if self.fault == "off-by-one" and self.index == 1:
            allowed = torch.ones(length, length, dtype=torch.bool).tril(1)
        if self.fault == "unmasked" and self.index == 1:
            allowed = torch.ones(length, length, dtype=torch.bool)
        allowed = allowed[None, None]
        if self.fault != "mask-ignored":
            allowed = allowed & real[:, None, None]
        low = float("-inf") if self.fault == "masked-row-nan" else torch.finfo(scores.dtype).min
        weights = scores.masked_fill(~allowed, low).softmax(-1)
        merged = weights @ v
        if self.fault == "head-merge":
            merged = merged.reshape(batch, length, d)
        else:
            merged = merged.transpose(1, 2).reshape(batch, length, d)
        x = x + self.out(merged)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def step(model: Leaky, *, ahead: int = 0):
    """A step function that keeps the ids; ``ahead`` counts positions wrongly from the second step on."""

    def go(ids: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        ids = ids if state is None else torch.cat([state, ids], 1)
        x = model.table(ids) + model.places(torch.arange(ids.shape[1]) + (ahead if ids.shape[1] > 1 else 0))
        for block in model.blocks:
            x = block(x, torch.ones_like(ids).bool())
        return model.head(model.norm(x))[:, -1:], ids

    return go
