"""Time first, einsum everywhere, weights as bare parameters; rotary, gated, grouped keys."""

from __future__ import annotations

import torch
from torch import Tensor, einsum, nn
from torch.nn import functional as F

D, H, G, K, FF, V = 36, 6, 3, 6, 44, 39


class Block(nn.Module):
    def __init__(self, faults: frozenset[str]) -> None:
        super().__init__()
        self.faults = faults
        shapes = {
            "wq": (D, H * K), "wk": (D, G * K), "wv": (D, G * K), "wo": (H * K, D),
            "w_in": (D, 2 * FF), "w_out": (FF, D), "g1": (D,), "g2": (D,), "gq": (K,), "gk": (K,),
        }  # fmt: skip
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def rms(self, x: Tensor, g: Tensor) -> Tensor:
        eps = 1e-3 if "norm-eps" in self.faults else 1e-6
        gain = 1.0 + g if "norm-offset" in self.faults else g
        return x / (einsum("...d,...d->...", x, x)[..., None] / x.shape[-1] + eps).sqrt() * gain

    def turn(self, x: Tensor) -> Tensor:  # [T, B, h, k]
        theta = 30.0 if "rope-frequency" in self.faults else 100.0
        half = K // 2
        freq = theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(x.shape[0])[:, None] * freq
        cos, sin = angle.cos().to(x)[:, None, None], angle.sin().to(x)[:, None, None]
        if "rope-direction" in self.faults:
            sin = -sin
        if "rope-pairing" in self.faults:
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

    def attend(self, x: Tensor, allowed: Tensor) -> Tensor:
        f = self.faults
        q = einsum("tbd,de->tbe", x, self.wq).unflatten(-1, (H, K))
        k = einsum("tbd,de->tbe", x, self.wk).unflatten(-1, (G, K))
        v = einsum("tbd,de->tbe", x, self.wv).unflatten(-1, (G, K))
        if "qk-norm" not in f:
            q, k = F.rms_norm(q, (K,), self.gq, 1e-6), F.rms_norm(k, (K,), self.gk, 1e-6)
        q, k = self.turn(q), self.turn(k)
        if "key-shift" in f:
            k = torch.cat([k[:1], k[:-1]])
        if "kv-head-order" in f:
            q = q.unflatten(2, (H // G, G)).transpose(2, 3)
        else:
            q = q.unflatten(2, (G, H // G))
        scores = einsum("tbgrk,sbgk->bgrts", q, k)
        scores = scores * (1.0 if "attention-scale" in f else K**-0.5)
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        p = scores.softmax(-1)
        if "sink" in f:
            p = scores.exp() / (1 + scores.exp().sum(-1, keepdim=True))
        y = einsum("bgrts,sbgk->tbgrk", p, v)
        if "kv-head-order" in f:
            y = y.transpose(2, 3)
        return einsum("tbe,ed->tbd", y.flatten(2), self.wo)

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        f = self.faults
        x = x + self.attend(self.rms(x, self.g1), allowed)
        a, c = einsum("tbd,df->tbf", self.rms(x, self.g2), self.w_in).chunk(2, -1)
        if "gate-order" in f:
            a, c = c, a
        act = F.gelu(a) if "activation" in f else a * a.sigmoid()
        y = act + c if "gate-sum" in f else act * c
        return x + einsum("tbf,fd->tbd", y, self.w_out)


class TimeFirst(nn.Module):
    """``ids``, ``padding_mask`` (True = padding) → ``[B, T, V]``."""

    def __init__(
        self, *faults: str, at: int | None = None, causal: bool = True, window: int | None = None
    ) -> None:
        super().__init__()
        self.faults, self.causal, self.window = frozenset(faults), causal, window
        self.table, self.head = nn.Parameter(torch.zeros(V, D)), nn.Parameter(torch.zeros(D, V))
        self.final, self.shift = nn.Parameter(torch.zeros(D)), nn.Parameter(torch.zeros(V))
        self.blocks = nn.ModuleList(Block(self.faults if at in (None, i) else frozenset()) for i in range(2))

    def forward(self, ids: Tensor, padding_mask: Tensor) -> Tensor:
        f, t = self.faults, ids.shape[1]
        x = self.table[ids.t()]
        far = torch.arange(t) - torch.arange(t)[:, None]
        allowed = ~padding_mask[:, None, :].expand(-1, t, -1)
        if "mask-polarity" in f:
            allowed = torch.ones_like(allowed)
        if self.causal and "causality" not in f:
            allowed = allowed & (far <= 0)
        if self.window is not None:
            allowed = allowed & (far > -self.window - ("sliding-window" in f))
        allowed = allowed[:, None, None]
        for block in self.blocks:
            x = block(x, allowed)
        if "norm-missing" not in f:
            x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.final
        logits = einsum("tbd,dv->btv", x, self.head)
        return logits if "output-bias" in f else logits + self.shift
