"""A decoder as one function of stacked weights ``[layers, …]`` with einsum, and the same by modules.

Biases are added after products are split; queries and keys of the function lie in pairs, those of the modules
in halves; both have a window on every other layer, caps, and RMSNorm with 1 + w.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, einsum, nn
from torch.nn import functional as F

WIDTH, HEADS, SHARED, HEAD, INNER, VOCABULARY, LAYERS = 48, 6, 2, 8, 40, 41, 2
WINDOW, CAP, LAST_CAP = 5, 4.0, 6.0
SIZES = {
    "q": (WIDTH, HEADS, HEAD), "qb": (HEADS, HEAD), "kv": (2, WIDTH, SHARED, HEAD), "kvb": (2, SHARED, HEAD),
    "o": (HEADS, HEAD, WIDTH), "ob": (WIDTH,), "up": (2, WIDTH, INNER), "upb": (2, INNER),
    "down": (INNER, WIDTH), "downb": (WIDTH,), "first": (WIDTH,), "second": (WIDTH,),
}  # fmt: skip


class Functional(nn.Module):
    """``tokens``, ``mask`` (1 = real) → logits; ``fault`` at layer ``at`` (None: everywhere)."""

    def __init__(self, fault: str = "", at: int | None = None, normed: bool = False) -> None:
        super().__init__()
        self.fault, self.at, self.normed = fault, at, normed
        sizes = {n: (LAYERS, *s) for n, s in SIZES.items()} | {"table": (VOCABULARY, WIDTH), "last": (WIDTH,)}
        sizes |= {"qn": (LAYERS, HEAD), "kn": (LAYERS, HEAD)} if normed else {}
        self.p = nn.ParameterDict({n: nn.Parameter(torch.zeros(s)) for n, s in sizes.items()})

    def rms(self, x: Tensor, w: Tensor, fault: str = "") -> Tensor:
        y = x / torch.sqrt(einsum("...d,...d->...", x, x)[..., None] / x.shape[-1] + 1e-6)
        return y * w if fault == "norm-offset" else y * (1 + w)

    def turned(self, x: Tensor, fault: str) -> Tensor:
        width = 4 if fault == "rope-partial" else HEAD
        angle = torch.arange(x.shape[1])[:, None] * 100.0 ** (-torch.arange(0, width, 2) / width)
        sin, cos = angle.sin()[:, None], angle.cos()[:, None]
        pairs, rest = x[..., :width].unflatten(-1, (-1, 2)), x[..., width:]
        one, two = pairs[..., 0], pairs[..., 1]
        turned = torch.stack([one * cos - two * sin, two * cos + one * sin], -1).flatten(-2)
        return torch.cat([turned, rest], -1)

    def attend(self, x: Tensor, w: dict[str, Tensor], fault: str, allowed: Tensor) -> Tensor:
        q = einsum("btd,dhk->bthk", x, w["q"]) + w["qb"]
        k, v = einsum("btd,cdgk->cbtgk", x, w["kv"])
        k = k if fault == "key-bias" else k + w["kvb"][0]
        v = v if fault == "value-bias" else v + w["kvb"][1]
        if self.normed:
            q, k = self.rms(q, w["qn"], fault), self.rms(k, w["kn"], fault)
        q, k = self.turned(q, fault) * HEAD**-0.5, self.turned(k, fault)
        tiled = fault == "kv-head-order"
        q = q.unflatten(2, (-1, SHARED)).transpose(2, 3) if tiled else q.unflatten(2, (SHARED, -1))
        s = einsum("btgrk,bsgk->bgrts", q, k)
        s = CAP * torch.tanh(s / CAP)
        s = s.clamp(-0.7, 0.7) if fault == "clamp" else s
        s = torch.where(allowed[:, None, None], s, -2.4e38)
        if fault == "sink":
            e = (s - s.amax(-1, keepdim=True)).exp()
            p = e / (1 + e.sum(-1, keepdim=True))
        else:
            p = s.softmax(-1)
        y = einsum("bgrts,bsgk->btgrk", p, v)
        y = (y.transpose(2, 3) if tiled else y).flatten(2, 3)
        return einsum("bthk,hkd->btd", y, w["o"]) + w["ob"]

    def feed(self, x: Tensor, w: dict[str, Tensor], fault: str) -> Tensor:
        gate, content = einsum("btd,cdf->cbtf", x, w["up"])
        gate = gate if fault == "gate-bias" else gate + w["upb"][0]
        return einsum("btf,fd->btd", F.silu(gate) * (content + w["upb"][1]), w["down"]) + w["downb"]

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        p, at = self.p, torch.arange(tokens.shape[1])
        first = p["table"][tokens]
        x = first * math.sqrt(WIDTH)
        for i in range(LAYERS):
            w = {n: value[i] for n, value in p.items() if n not in ("table", "last")}
            fault = self.fault if self.at in (None, i) else ""
            allowed = (
                (at <= at[:, None]) & ((at > at[:, None] - WINDOW) | (i % 2 == 1)) & mask[:, None].bool()
            )
            y = self.attend(self.rms(x, w["first"], fault), w, fault, allowed)
            x = y if fault == "skip-missing" else x + y
            norm = "first" if fault == "norm-instance" else "second"
            x = x + self.feed(self.rms(x, w[norm], fault), w, fault)
            x = x + first if fault == "embedding-again" else x
        logits = einsum("btd,vd->btv", self.rms(x, p["last"], self.fault), p["table"])
        return LAST_CAP * torch.tanh(logits / LAST_CAP)


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + self.weight)


class _Layer(nn.Module):
    def __init__(self, number: int, fault: str, normed: bool) -> None:
        super().__init__()
        self.number, self.fault, self.normed = number, fault, normed
        self.q, self.o = nn.Linear(WIDTH, HEADS * HEAD), nn.Linear(HEADS * HEAD, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, SHARED * HEAD) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, INNER) for _ in range(2))
        self.down, self.first, self.second = nn.Linear(INNER, WIDTH), _Norm(WIDTH), _Norm(WIDTH)
        if normed:
            self.qn, self.kn = _Norm(HEAD), _Norm(HEAD)

    def turned(self, x: Tensor) -> Tensor:
        width = 4 if self.fault == "rope-partial" else HEAD
        angle = torch.arange(x.shape[2])[:, None] * 100.0 ** (-torch.arange(0, width, 2) / width)
        cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
        y, rest = x[..., :width], x[..., width:]
        one, two = y.chunk(2, -1)
        return torch.cat([y * cos + torch.cat([-two, one], -1) * sin, rest], -1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y, at = self.first(x), torch.arange(x.shape[1])
        q, k, v = (m(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for m in (self.q, self.k, self.v))
        if self.normed:
            q, k = self.qn(q), self.kn(k)
        k, v = (z.repeat_interleave(HEADS // SHARED, 1) for z in (self.turned(k), v))
        s = CAP * torch.tanh(self.turned(q) @ k.mT * HEAD**-0.5 / CAP)
        allowed = (at <= at[:, None]) & ((at > at[:, None] - WINDOW) | (self.number % 2 == 1))
        s = s.masked_fill(~(allowed & mask[:, None, None].bool()), torch.finfo(s.dtype).min)
        x = x + self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))
        y = self.second(x)
        gate = F.linear(y, self.gate.weight) if self.fault == "gate-bias" else self.gate(y)
        return x + self.down(F.silu(gate) * self.up(y))


class Modules(nn.Module):
    """``input_ids``, ``attention_mask`` → logits."""

    def __init__(self, fault: str = "", at: int | None = None, normed: bool = False) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(VOCABULARY, WIDTH), _Norm(WIDTH)
        self.layers = nn.ModuleList(
            _Layer(i, fault if at in (None, i) else "", normed) for i in range(LAYERS)
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.table(input_ids) * WIDTH**0.5
        for layer in self.layers:
            x = layer(x, attention_mask)
        return LAST_CAP * torch.tanh(F.linear(self.last(x), self.table.weight) / LAST_CAP)


def _paired(x: Tensor) -> Tensor:
    """Halves of the last axis as pairs."""
    return torch.stack(x.chunk(2, -1), -1).flatten(-2)


def _by_head(weight: Tensor) -> Tensor:
    return weight.T.unflatten(-1, (-1, HEAD))


def loaded(function: Functional, modules: Modules) -> Functional:
    """A function with the weights of modules."""
    with torch.no_grad():
        function.p["table"].copy_(modules.table.weight)
        function.p["last"].copy_(modules.last.weight)
        for i, m in enumerate(modules.layers):
            values: dict[str, Any] = {
                "q": _paired(_by_head(m.q.weight)), "qb": _paired(m.q.bias.view(-1, HEAD)),
                "kv": torch.stack([_paired(_by_head(m.k.weight)), _by_head(m.v.weight)]),
                "kvb": torch.stack([_paired(m.k.bias.view(-1, HEAD)), m.v.bias.view(-1, HEAD)]),
                "o": m.o.weight.T.unflatten(0, (-1, HEAD)), "ob": m.o.bias,
                "up": torch.stack([m.gate.weight.T, m.up.weight.T]),
                "upb": torch.stack([m.gate.bias, m.up.bias]),
                "down": m.down.weight.T, "downb": m.down.bias,
                "first": m.first.weight, "second": m.second.weight,
            }  # fmt: skip
            values |= {"qn": _paired(m.qn.weight), "kn": _paired(m.kn.weight)} if function.normed else {}
            for name, value in values.items():
                function.p[name][i] = value
    return function
