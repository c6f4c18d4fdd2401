"""Experts kept as one tensor each, their products written in different ways, in a decoder of two layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, EXPERTS, INNER, VOCABULARY, HEADS = 24, 4, 24, 37, 4


class Experts(nn.Module):
    """A gated network for each; ``fault`` is that of expert 2, in the style "gathered" that of all."""

    def __init__(self, style: str, fault: str) -> None:
        super().__init__()
        self.style, self.fault = style, fault
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.w1, self.b1 = (nn.Parameter(torch.zeros(EXPERTS, *n, 2 * INNER)) for n in ((WIDTH,), ()))
        self.w2, self.b2 = (nn.Parameter(torch.zeros(EXPERTS, *n, WIDTH)) for n in ((INNER,), ()))

    def gated(self, h: Tensor, experts: int, features: int) -> Tensor:
        def one(z: Tensor, fault: str) -> Tensor:
            gate, content = z.chunk(2, features)
            gate, content = (content, gate) if fault == "gate-order" else (gate, content)
            return (F.gelu(gate) if fault == "activation" else F.silu(gate)) * content

        each = [one(h.select(experts, i), self.fault if i == 2 else "") for i in range(EXPERTS)]
        return torch.stack(each, experts)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        scores = self.router(flat)
        best, chosen = scores.topk(2, -1)
        share = torch.zeros_like(scores).scatter(-1, chosen, best.softmax(-1))
        w1, w2, b1, b2 = self.w1, self.w2, self.b1, self.b2
        own = (torch.arange(EXPERTS) == 2)[:, None]
        if self.fault == "weight-transpose":
            w2 = torch.where(own[..., None], w2.mT, w2)
        b1 = torch.where(own, 0.0, b1) if self.fault == "bias-missing" else b1
        b2 = torch.where(own, 0.0, b2) if self.fault == "last-bias" else b2
        if self.style == "batched":
            h = self.gated(torch.bmm(flat.expand(EXPERTS, -1, -1), w1) + b1[:, None], 0, -1)
            y = ((torch.bmm(h, w2) + b2[:, None]) * share.t()[..., None]).sum(0)
        elif self.style == "einsum":
            h = self.gated(torch.einsum("td,edf->tef", flat, w1) + b1, 1, -1)
            y = torch.einsum("ted,te->td", torch.einsum("tef,efd->ted", h, w2) + b2, share)
        elif self.style == "matrices first":
            h = self.gated(torch.einsum("edf,td->eft", w1, flat) + b1[..., None], 0, -2)
            y = torch.einsum("edt,te->td", torch.einsum("efd,eft->edt", w2, h) + b2[..., None], share)
        elif self.style == "gathered":
            h = torch.einsum("ti,taif->taf", flat, w1[chosen]) + b1[chosen]
            gate, content = h.chunk(2, -1)
            gate, content = (content, gate) if self.fault == "gate-order" else (gate, content)
            h = (F.gelu(gate) if self.fault == "activation" else F.silu(gate)) * content
            y = torch.einsum("taf,tafd->tad", h, w2[chosen]) + b2[chosen]
            y = (y * best.softmax(-1)[..., None]).sum(1)
        else:
            y = torch.zeros_like(flat)
            for e in range(EXPERTS):
                row, nth = torch.where(chosen == e)
                gate, content = (flat[row] @ w1[e] + b1[e]).chunk(2, -1)
                out = (F.silu(gate) * content) @ w2[e] + b2[e]
                y = y.index_add(0, row, out * best.softmax(-1)[row, nth, None])
        return y.view_as(x)


class Layer(nn.Module):
    def __init__(self, style: str, fault: str) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.o, self.experts = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            Experts(style, fault),
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = (z.unflatten(-1, (HEADS, -1)).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, -1))
        x = x + self.o(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.experts(self.n2(x))


class Mixture(nn.Module):
    """``ids`` → logits; the fault is the second layer's."""

    def __init__(self, style: str, fault: str = "") -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(Layer(style, fault if i else "") for i in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.table.weight.t()
