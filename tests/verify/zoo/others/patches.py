"""An encoder over vectors: one in front, positions interpolated, branches scaled, queries normalised."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

D, H, FF, IN, OUT = 24, 6, 36, 10, 5
Faults = frozenset[str]


class Block(nn.Module):
    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.faults = faults
        self.norm_1, self.norm_2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.proj, self.up, self.down = (
            nn.Linear(n, m) for n, m in ((D, 3 * D), (D, D), (D, FF), (FF, D))
        )
        self.q_norm, self.k_norm = nn.LayerNorm(D // H), nn.LayerNorm(D // H)
        self.gamma_1, self.gamma_2 = nn.Parameter(torch.zeros(D)), nn.Parameter(torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        f, (b, n, _) = self.faults, x.shape
        q, k, v = self.qkv(self.norm_1(x)).reshape(b, n, 3, H, D // H).permute(2, 0, 3, 1, 4)
        of_q, of_k = (self.k_norm, self.q_norm) if "qk-exchanged" in f else (self.q_norm, self.k_norm)
        if "qk-eps" in f:
            norms = F.layer_norm(q, (D // H,), eps=0.02), F.layer_norm(k, (D // H,), eps=0.02)
            q, k = (x * n.weight + n.bias for x, n in zip(norms, (of_q, of_k), strict=True))
        else:
            q, k = (q, k) if "qk-norm" in f else (of_q(q), of_k(k))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, D)
        x = x + self.gamma_1 * self.proj(y)
        y = self.up(self.norm_2(x))
        return x + self.gamma_2 * self.down(F.relu(y) if "activation" in f else F.gelu(y))


class Patches(nn.Module):
    """``x`` vectors; ``front``: positions are added before the first vector is put in front."""

    def __init__(self, *faults: str, at: int | None = None, front: bool = False) -> None:
        super().__init__()
        own = [frozenset(faults) if at in (None, i) else frozenset[str]() for i in range(2)]
        self.front = front or "front" in faults
        self.embed, self.first = nn.Linear(IN, D), nn.Parameter(torch.zeros(1, 1, D))
        self.places = nn.Parameter(torch.zeros(1, 9, D))
        self.blocks = nn.ModuleList(Block(f) for f in own)
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, OUT)

    def forward(self, x: Tensor) -> Tensor:
        y, first, grid = self.embed(x), self.places[:, :1], self.places[:, 1:].transpose(1, 2)
        grid = F.interpolate(grid, size=x.shape[1], mode="linear").transpose(1, 2)
        if self.front:
            y = torch.cat([(self.first + first).expand(len(x), -1, -1), y + grid], 1)
        else:
            y = torch.cat([self.first.expand(len(x), -1, -1), y], 1) + torch.cat([first, grid], 1)
        for block in self.blocks:
            y = block(y)
        return self.head(self.norm(y)[:, 0])
