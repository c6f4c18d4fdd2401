"""Norms around both sublayers, windows in every other layer, caps, (1 + w), √d; and a packed port."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

D, H, G, K, FF, V, LAYERS, WINDOW = 36, 6, 2, 8, 40, 43, 4, 4
Faults = frozenset[str]


def rms(x: Tensor, weight: Tensor, faults: Faults = frozenset()) -> Tensor:
    eps = 1e-3 if "norm-eps" in faults else 1e-6
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return y * (weight if "norm-offset" in faults else 1 + weight)


def turn(x: Tensor, places: Tensor, faults: Faults = frozenset()) -> Tensor:
    """``[B, h, T, K]``."""
    width = K // 2 if "rope-partial" in faults else K
    half, theta = width // 2, 300.0 if "rope-frequency" in faults else 100.0
    angle = places[:, None, :, None] * theta ** (-torch.arange(half, dtype=x.dtype) * 2 / width)
    cos, sin, rest = angle.cos(), angle.sin(), x[..., width:]
    if "rope-pairing" in faults:
        a, b = x[..., 0:width:2], x[..., 1:width:2]
        return torch.cat([torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2), rest], -1)
    a, b = x[..., :half], x[..., half:width]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        return rms(x, self.weight)


class Attention(nn.Module):
    def __init__(self, local: bool) -> None:
        super().__init__()
        self.local = local
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(D, n * K) for n in (H, G, G))
        self.o_proj = nn.Linear(H * K, D)

    def forward(self, x: Tensor, places: Tensor, real: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, K)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = turn(q, places), turn(k, places).repeat_interleave(H // G, 1)
        scores = 3.0 * torch.tanh(q @ k.transpose(-1, -2) * K**-0.5 / 3.0)
        i, j = torch.arange(x.shape[1])[:, None], torch.arange(x.shape[1])
        allowed = (j <= i) & (j > i - WINDOW) if self.local else j <= i
        scores = scores.masked_fill(~(allowed & real[:, None])[:, None], torch.finfo(scores.dtype).min)
        mixed = scores.softmax(-1) @ v.repeat_interleave(H // G, 1)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class GeGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(D, FF), nn.Linear(D, FF), nn.Linear(FF, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(number % 2 == 0), GeGLU()
        self.before, self.behind, self.before_mlp, self.behind_mlp = (Norm() for _ in range(4))

    def forward(self, x: Tensor, places: Tensor, real: Tensor) -> Tensor:
        x = x + self.behind(self.self_attn(self.before(x), places, real))
        return x + self.behind_mlp(self.mlp(self.before_mlp(x)))


class Sandwich(nn.Module):
    """``input_ids``, ``attention_mask`` → logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.norm = nn.Embedding(V, D), Norm()
        self.layers = nn.ModuleList(Layer(i) for i in range(LAYERS))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        places = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        x = self.embed_tokens(input_ids) * D**0.5
        for layer in self.layers:
            x = layer(x, places, attention_mask.bool())
        return 4 * torch.tanh(self.norm(x) @ self.embed_tokens.weight.t() / 4)

    def ported(self, *faults: str, at: int | None = None) -> nn.Module:
        return Packed(self, frozenset(faults), at)


class Packed(nn.Module):
    """The same from one dictionary of tensors, time first, groups by einsum, norms kept together."""

    def __init__(self, a: Sandwich, faults: Faults, at: int | None) -> None:
        super().__init__()
        self.faults, self.at = faults, at
        self.wte = nn.Parameter(a.embed_tokens.weight.detach().clone())
        kept: dict[str, Tensor] = {"norm": a.norm.weight}
        for i, layer in enumerate(a.layers):
            assert isinstance(layer, Layer)
            own, mlp = layer.self_attn, layer.mlp
            for name, maps in (
                ("qkv", (own.q_proj, own.k_proj, own.v_proj)),
                ("o", (own.o_proj,)),
                ("gu", (mlp.gate_proj, mlp.up_proj)),
                ("d", (mlp.down_proj,)),
            ):
                kept[f"{name}{i}"] = torch.cat([m.weight for m in maps]).t()
                kept[f"b{name}{i}"] = torch.cat([m.bias for m in maps])
            norms = layer.before, layer.behind, layer.before_mlp, layer.behind_mlp
            kept[f"norms{i}"] = torch.stack([n.weight for n in norms])
        self.kept = nn.ParameterDict({k: nn.Parameter(v.detach().clone()) for k, v in kept.items()})

    def by(self, name: str, i: int, x: Tensor) -> Tensor:
        return x @ self.kept[f"{name}{i}"] + self.kept[f"b{name}{i}"]

    def attend(self, x: Tensor, i: int, places: Tensor, real: Tensor, f: Faults) -> Tensor:
        t, b = x.shape[:2]
        q, k, v = self.by("qkv", i, x).split([H * K, G * K, G * K], -1)
        q, k, v = (z.reshape(t, b, -1, K).permute(1, 2, 0, 3) for z in (q, k, v))
        q, k = turn(q, places, f), turn(k, places, f)
        tiled = "kv-head-order" in f
        q = q.reshape(b, H // G, G, t, K).transpose(1, 2) if tiled else q.reshape(b, G, H // G, t, K)
        if "value-scale" in f:
            v = torch.cat([v[:, :1] * 1.1, v[:, 1:]], 1)
        s = torch.einsum("bgrik,bgjk->bgrij", q * (D if "attention-scale" in f else K) ** -0.5, k)
        cap = 1.5 if "cap-value" in f else 3.0
        s = s if "softcap" in f else (s / cap).tanh() * cap
        m, n = torch.arange(t)[:, None], torch.arange(t)
        allowed = ((n <= m) | ("causality" in f))[None] & (real | ("mask-polarity" in f))[:, None]
        if i % 2 == ("sliding-layers" in f) and "sliding-lost" not in f:
            allowed = allowed & (n > m - WINDOW - int("sliding-window" in f))
        w = (s + torch.zeros(allowed.shape).masked_fill(~allowed, -1e9)[:, None, None]).softmax(-1)
        if "head-dropped" in f:
            w = torch.cat([w[:, :, :-1], w[:, :, -1:] * 0], 2)
        o = torch.einsum("bgrij,bgjk->bgrik", w, v)
        o = (o.transpose(1, 2) if tiled else o).reshape(b, H, t, K)
        if "head-merge" in f:
            return o.reshape(b, t, H * K).transpose(0, 1)
        return o.permute(2, 0, 1, 3).reshape(t, b, H * K)

    def feed_forward(self, x: Tensor, i: int, f: Faults) -> Tensor:
        gate, up = self.by("gu", i, x).chunk(2, -1)
        if "gate-order" in f:
            gate, up = up, gate
        act = 0.5 * gate * (1 + torch.tanh((2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
        h = (F.gelu(gate) if "activation" in f else act) * up
        h = h - h.mean(-1, keepdim=True) if "mean-out" in f else h
        return self.by("d", i, torch.cat([-h[..., :1], h[..., 1:]], -1) if "sign" in f else h)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        every, real = self.faults, attention_mask.bool()
        places = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        x = F.embedding(input_ids.t(), self.wte) * (1 if "embedding-scale" in every else D**0.5)
        for i in (0, 2, 1, 3) if "layers-swapped" in every else range(LAYERS):
            f = every if self.at in (None, i) else frozenset[str]()
            before, behind, before_mlp, behind_mlp = self.kept[f"norms{i}"]
            y = rms(x, before, f)
            y = torch.cat([y[:1], y[:-1]], 0) if "token-shift" in f else y
            y = self.by("o", i, self.attend(y, i, places, real, f))
            y = y if "norm-missing-behind" in f else rms(y, behind, f)
            before_sum, x = x, x + (0.7 * y if "residual-scale" in f else y)
            y = before_sum if "parallel-residual" in f else x
            y = y if "norm-missing" in f else rms(y, before if "norm-instance" in f else before_mlp, f)
            x = x + rms(self.feed_forward(y, i, f), behind_mlp, f)
        x = (
            x
            if "final-norm" in every
            else rms(x, self.kept["norm"], every if self.at is None else frozenset())
        )
        y = (x @ self.wte.t()).transpose(0, 1)
        y = y + torch.linspace(-1, 1, V) if "output-bias" in every else y
        return y if "logit-cap" in every else torch.tanh(y / 4) * 4
