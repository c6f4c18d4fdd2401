"""A decoder that keeps keys and values, and what goes wrong with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .steps import rotate

Past = list[tuple[Tensor, Tensor]]


class Cached(nn.Module):
    """``forward(ids, past_key_values=…)`` → logits and the new past; rotary or learned positions."""

    def __init__(self, fault: str = "", *, rotary: bool = True, d: int = 24, heads: int = 6) -> None:
        super().__init__()
        self.fault, self.rotary, self.heads = fault, rotary, heads
        self.table, self.places = nn.Embedding(31, d), nn.Embedding(40, d)
        self.qkv = nn.ModuleList(nn.Linear(d, 3 * d) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(d, d) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(d, 40) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(40, d) for _ in range(2))
        self.head = nn.Linear(d, 31, bias=False)

    def forward(
        self, ids: Tensor, past_key_values: Past | None = None, use_cache: bool = False
    ) -> dict[str, Any]:
        """One chunk behind the past."""
        start = 0 if past_key_values is None else past_key_values[0][0].shape[2]
        seen = start
        if start:
            seen = {"ahead": start + 1, "behind": start - 1, "reset": 0}.get(self.fault, start)
        positions = torch.arange(seen, seen + ids.shape[1]).expand_as(ids)
        x, new = self.table(ids), list[tuple[Tensor, Tensor]]()
        if not self.rotary:
            x = x + self.places(positions)
        for i in range(2):
            y, kept = self.attend(i, x, positions, None if past_key_values is None else past_key_values[i])
            new.append(kept)
            x = x + y
            x = x + self.down[i](F.gelu(self.up[i](x)))
        return {"logits": self.head(x), "past_key_values": new if use_cache else None}

    def attend(self, i: int, x: Tensor, positions: Tensor, past: tuple[Tensor, Tensor] | None) -> Any:
        batch, length, d = x.shape
        q, k, v = self.qkv[i](x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.rotary:
            counted = positions + (self.fault == "layer-counter" and i == 1 and past is not None)
            q, k = (rotate(z, counted, {}, 100.0, 4) for z in (q, k))
        if past is not None:
            if self.fault == "rolled":
                past = (past[0], past[1].roll(1, 2))
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        size = k.shape[2]
        allowed = torch.ones(length, size, dtype=torch.bool).tril(size - length)
        if self.fault == "top-left" and length > 1:
            allowed = torch.ones(length, size, dtype=torch.bool).tril()
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.out[i](mixed.transpose(1, 2).reshape(batch, length, d)), (k, v)
