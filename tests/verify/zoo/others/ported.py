"""One decoder twice: as a library keeps it, and as a port of a few lines.

The library has a bias in every map, turns halves, and calls experts one after the other. The port turns
complex numbers, adds the biases of queries, keys and values by head after one product, those of both branches
after the sum, and computes all experts by one einsum.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH, HEADS, INNER, EXPERTS, LAYERS = 31, 24, 3, 20, 3, 2
HEAD = WIDTH // HEADS


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("inv_freq", 1 / (100 ** (torch.arange(0, HEAD, 2) / HEAD)), persistent=False)

    def turned(self, x: Tensor) -> Tensor:
        angle = torch.outer(torch.arange(x.shape[-2]).double(), self.inv_freq.double())
        angle = torch.cat([angle, angle], -1).to(x)
        one, two = x.chunk(2, -1)
        return x * angle.cos() + torch.cat([-two, one], -1) * angle.sin()

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (m(x).view(b, t, HEADS, HEAD).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, t, WIDTH))


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.ModuleList(nn.Linear(WIDTH, INNER, bias=False) for _ in range(EXPERTS))
        self.down = nn.ModuleList(nn.Linear(INNER, WIDTH, bias=False) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        weight, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        weight, out = weight / weight.sum(-1, keepdim=True), torch.zeros_like(flat)
        for e in range(EXPERTS):
            row, nth = torch.where(chosen == e)
            out = out.index_add(0, row, self.down[e](F.silu(self.up[e](flat[row]))) * weight[row, nth, None])
        return out.view_as(x)


class _Layer(nn.Module):
    def __init__(self, experts: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.attn = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), _Attention()
        self.experts = _Experts() if experts else None
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.experts is not None:
            x = x + self.attn(self.ln_1(x))
            return x + self.experts(self.ln_2(x))
        return x + self.attn(self.ln_1(x)) + self.down(F.gelu(self.up(self.ln_2(x))))


class Library(nn.Module):
    """The reference; with experts the branches are in sequence, without in parallel."""

    def __init__(self, experts: bool = False) -> None:
        super().__init__()
        self.wte, self.ln_f = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(_Layer(experts) for _ in range(LAYERS))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.wte(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.ln_f(x) @ self.wte.weight.T


class Port(nn.Module):
    """The same function; ``fault`` at layer ``at``."""

    def __init__(self, of: Library, fault: str = "", at: int = 1) -> None:
        super().__init__()
        self.fault, self.at = fault, at
        p: dict[str, Tensor] = {"wte": of.wte.weight, "gf": of.ln_f.weight, "bf": of.ln_f.bias}
        for i, layer in enumerate(of.layers):
            a = layer.attn
            pairs = (
                m.view(HEADS, 2, HEAD // 2, -1).transpose(1, 2).flatten(0, 2)
                for m in (a.q.weight, a.k.weight)
            )
            p[f"qkv{i}"] = torch.cat([*pairs, a.v.weight]).T
            for n, m in (("q", a.q), ("k", a.k)):
                p[f"{n}b{i}"] = m.bias.view(HEADS, 2, HEAD // 2).transpose(1, 2).reshape(HEADS, 1, HEAD)
            p[f"vb{i}"], p[f"o{i}"] = a.v.bias.view(HEADS, 1, HEAD), a.o.weight.T
            p |= {f"g1{i}": layer.ln_1.weight, f"b1{i}": layer.ln_1.bias}
            p |= {f"g2{i}": layer.ln_2.weight, f"b2{i}": layer.ln_2.bias}
            p[f"both{i}"] = a.o.bias + layer.down.bias if layer.experts is None else a.o.bias
            if layer.experts is None:
                p |= {f"up{i}": layer.up.weight.T, f"ub{i}": layer.up.bias, f"down{i}": layer.down.weight.T}
                continue
            p[f"gate{i}"] = layer.experts.gate.weight.T
            p[f"up{i}"] = torch.stack([m.weight.T for m in layer.experts.up])
            p[f"down{i}"] = torch.stack([m.weight.T for m in layer.experts.down])
        self.p = nn.ParameterDict({n: nn.Parameter(v.detach().clone()) for n, v in p.items()})

    def forward(self, tokens: Tensor) -> Tensor:
        p, (b, t) = self.p, tokens.shape
        x, places = p["wte"][tokens], torch.arange(t).double()

        def norm(x: Tensor, n: str, eps: float = 1e-5) -> Tensor:
            return F.layer_norm(x, (WIDTH,), p[f"g{n}"], p[f"b{n}"], eps)

        for i in range(LAYERS):
            fault = self.fault if i == self.at else ""
            base = 1000.0 if fault == "theta" else 100.0
            angle = places[:, None] / base ** (torch.arange(0, HEAD, 2).double() / HEAD)
            turn = torch.polar(torch.ones_like(angle), -angle if fault == "backwards" else angle)
            q, k, v = (norm(x, f"1{i}", 1e-6 if fault == "eps" else 1e-5) @ p[f"qkv{i}"]).split(WIDTH, -1)
            heads = [z.view(b, t, HEADS, HEAD).transpose(1, 2) for z in (q, k, v)]
            for j, n in enumerate("qkv"):
                heads[j] = heads[j] if fault == f"no {n} bias" else heads[j] + p[f"{n}b{i}"]
            q, k = (
                torch.view_as_real(
                    torch.view_as_complex(z.unflatten(-1, (-1, 2)).contiguous()) * turn
                ).flatten(-2)
                for z in heads[:2]
            )
            scores = q @ k.mT / (1 if fault == "scale" else math.sqrt(HEAD))
            y = (
                scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
                @ heads[2]
            )
            y = (y if fault == "merge" else y.transpose(1, 2)).reshape(b, t, WIDTH) @ p[f"o{i}"]
            if f"gate{i}" in p:
                x = x + y + p[f"both{i}"]
                h = norm(x, f"2{i}")
                share = (h @ p[f"gate{i}"]).softmax(-1)
                value, chosen = share.topk(1 if fault == "top one" else 2, -1)
                value = value if fault == "not one" else value / value.sum(-1, keepdim=True)
                share = torch.zeros_like(share).scatter(-1, chosen, value)
                f = torch.einsum(
                    "btef,efd->bted", F.silu(torch.einsum("btd,edf->btef", h, p[f"up{i}"])), p[f"down{i}"]
                )
                x = x + (f * share[..., None]).sum(2)
            else:
                f = F.gelu(norm(x, f"2{i}") @ p[f"up{i}"] + p[f"ub{i}"]) @ p[f"down{i}"]
                x = x + y + f
                x = x if fault == "no bias of both" else x + p[f"both{i}"]
        return norm(x, "f") @ p["wte"].T
