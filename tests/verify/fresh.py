"""A decoder (and an encoder–decoder) with a cache of its own, documents and a window; one fault each."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Norm(nn.Module):
    def __init__(self, d: int, fault: str) -> None:
        super().__init__()
        self.gain, self.outside = nn.Parameter(torch.ones(d)), fault == "eps-outside"

    def forward(self, x: Tensor) -> Tensor:
        square = x.pow(2).mean(-1, keepdim=True)
        return self.gain * x / (square.sqrt() + 1e-6 if self.outside else (square + 1e-6).sqrt())


class Attention(nn.Module):
    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))

    def forward(self, x: Tensor, read: Tensor, allowed: Tensor, past: Any = None) -> tuple[Tensor, Any]:
        q, k, v = (
            m(y).unflatten(-1, (self.heads, -1)).permute(0, 2, 1, 3)
            for m, y in ((self.q, x), (self.k, read), (self.v, read))
        )
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1)
        return self.o(torch.einsum("bhij,bhjd->bihd", weights, v).flatten(2)), (k, v)


class Block(nn.Module):
    def __init__(self, d: int, heads: int, fault: str, cross: bool) -> None:
        super().__init__()
        self.first, self.second = Norm(d, fault), Norm(d, fault)
        self.attention = Attention(d, heads)
        self.third, self.cross = (Norm(d, fault), Attention(d, heads)) if cross else (None, None)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(
        self, x: Tensor, allowed: Tensor, past: Any = None, memory: Tensor | None = None, seen: Any = None
    ) -> tuple[Tensor, Any]:
        y = self.first(x)
        found, past = self.attention(y, y, allowed, past)
        x = x + found
        if self.cross is not None:
            x = x + self.cross(self.third(x), memory, seen)[0]
        return x + self.down(F.silu(self.up(self.second(x)))), past


class Fresh(nn.Module):
    """``fault`` names what is wrong."""

    def __init__(self, fault: str = "", *, window: int | None = None, cross: bool = False) -> None:
        super().__init__()
        self.fault, self.window = fault, window
        self.table, self.places, self.dropout = nn.Embedding(31, 12), nn.Embedding(40, 12), nn.Dropout(0.2)
        self.blocks = nn.ModuleList(Block(12, 3, fault, cross) for _ in range(2))
        self.norm, self.head = Norm(12, fault), nn.Linear(12, 31, bias=False)
        self.head.weight = self.table.weight
        self.config = SimpleNamespace(tie_word_embeddings=True, is_decoder=True)
        if window is not None:
            self.config.sliding_window = window

    def _reorder_cache(self, past: Any, order: Tensor) -> Any:
        if self.fault == "beams":
            return past
        return tuple(tuple(x.index_select(0, order) for x in layer) for layer in past)

    def states(
        self, ids: Tensor, real: Any, documents: Any, past: Any, *memory: Tensor
    ) -> tuple[Tensor, Any]:
        before = 0 if past is None else past[0][0].shape[2]
        length = before + ids.shape[1]
        real = torch.ones(len(ids), length).bool() if real is None else real.bool()
        positions = (real.long().cumsum(-1) - 1).clamp(min=0)[:, before:]
        if self.fault == "cache-position" and before:
            positions = positions + 1
        x = self.table(ids) + self.places(positions)
        x = F.dropout(x, 0.2) if self.fault == "dropout-in-eval" else self.dropout(x)
        back = torch.arange(before, length)[:, None] - torch.arange(length)
        allowed = back >= 0
        if self.window is not None:
            wide = {"window-wide": 1, "window-narrow": -1}.get(self.fault, 0)
            allowed = allowed & (back < self.window + wide)
        if self.fault == "left-padding":
            real = real | (real.long().cumsum(-1) == 0)
        allowed = allowed & real[:, None, None]
        if documents is not None and self.fault != "documents":
            allowed = allowed & (documents[:, None, :, None] == documents[:, None, None])
        now: list[Any] = []
        for number, block in enumerate(self.blocks):
            seen = allowed
            if self.fault == "ahead" and number:
                seen = allowed | ((back == -1) & real[:, None, None])
            x, layer = block(x, seen, None if past is None else past[number], *memory)
            now.append(layer)
        return x, tuple(now)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        documents: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
    ) -> dict[str, Any]:
        x, past = self.states(input_ids, attention_mask, documents, past_key_values)
        return {"logits": self.head(self.norm(x)), "past_key_values": past}


class Both(Fresh):
    def __init__(self, fault: str = "") -> None:
        super().__init__(fault, cross=True)
        self.encoder = nn.ModuleList(Block(12, 3, fault, False) for _ in range(2))

    def forward(self, source_ids: Tensor, target_ids: Tensor, source_mask: Tensor) -> Tensor:
        real = source_mask.bool()
        x = self.table(source_ids) + self.places((real.long().cumsum(-1) - 1).clamp(min=0))
        allowed = real[:, None, None]
        for block in self.encoder:
            x, _ = block(x, allowed)
        seen = torch.ones_like(allowed) if self.fault == "cross-padding" else allowed
        return self.head(self.norm(self.states(target_ids, None, None, None, x, seen)[0]))


class Prefixed(Fresh):
    """Reads its condition both ways, and one token more where that is its fault."""

    def forward(self, ids: Tensor, prefix_lengths: Tensor) -> Tensor:
        x = self.dropout(self.table(ids) + self.places(torch.arange(ids.shape[1])))
        at = torch.arange(ids.shape[1])
        inside = at < prefix_lengths[:, None] + (self.fault == "prefix")
        allowed = (at[:, None] >= at) | (inside[:, :, None] & inside[:, None])
        for block in self.blocks:
            x, _ = block(x, allowed[:, None])
        return self.head(self.norm(x))
