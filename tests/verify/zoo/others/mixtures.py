"""Gated experts with biases, top 2 of 4: called in loops of three kinds, and all together by one einsum."""

from __future__ import annotations

import torch
from torch import Tensor, einsum, nn
from torch.nn import functional as F

WIDTH, INNER, EXPERTS, VOCABULARY, LAYERS = 24, 20, 4, 37, 2
SECOND = 2
"""The expert that the faults of one expert are planted in."""


def _chosen(logits: Tensor, fault: str) -> tuple[Tensor, Tensor]:
    if fault == "sigmoid":
        weight, chosen = logits.sigmoid().topk(2, -1)
    else:
        weight, chosen = logits.softmax(-1).topk(1 if fault == "top-one" else 2, -1)
    return (weight if fault == "as they are" else weight / weight.sum(-1, keepdim=True)), chosen


class _Expert(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.gate, self.up, self.down = (nn.Linear(*n) for n in ((WIDTH, INNER),) * 2 + ((INNER, WIDTH),))

    def forward(self, x: Tensor) -> Tensor:
        gate = F.linear(x, self.gate.weight) if self.fault == "gate-bias" else self.gate(x)
        y = (F.gelu(gate) if self.fault == "activation" else F.silu(gate)) * self.up(x)
        return F.linear(y, self.down.weight) if self.fault == "down-bias" else self.down(y)


class _Loop(nn.Module):
    """``how`` "where": tokens of each expert are written in place; "all": every expert reads every token."""

    def __init__(self, fault: str, how: str) -> None:
        super().__init__()
        self.fault, self.how = fault, how
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(_Expert(fault if e == SECOND else "") for e in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        logits, out = self.router(flat), torch.zeros_like(flat)
        weight, chosen = _chosen(logits, self.fault)
        share = torch.zeros_like(logits).scatter(-1, chosen, weight)
        for e, expert in enumerate(self.experts):
            if self.how == "all":
                out = out + share[:, e, None] * expert(flat)
            else:
                token, nth = torch.where(chosen == e)
                out[token] += weight[token, nth, None] * expert(flat[token])
        return out.view_as(x)


class _Together(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault, e = fault, EXPERTS
        sizes = {"router": (WIDTH, e), "up": (e, 2, WIDTH, INNER), "up_bias": (e, 2, INNER)}
        sizes |= {"down": (e, INNER, WIDTH), "down_bias": (e, WIDTH)}
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(size)))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = _chosen(einsum("btd,de->bte", x, self.router), self.fault)
        share = einsum("btk,btke->bte", weight, F.one_hot(chosen, EXPERTS).to(weight))
        others = (torch.arange(EXPERTS) != SECOND)[:, None]
        gate, content = einsum("btd,ecdf->cbtef", x, self.up)
        gate = gate + self.up_bias[:, 0] * (others if self.fault == "gate-bias" else 1)
        act = torch.where(others, F.silu(gate), F.gelu(gate)) if self.fault == "activation" else F.silu(gate)
        y = einsum("btef,efd->bted", act * (content + self.up_bias[:, 1]), self.down)
        y = y + self.down_bias * (others if self.fault == "down-bias" else 1)
        return einsum("bted,bte->btd", y, share)


class _Layer(nn.Module):
    def __init__(self, fault: str, how: str) -> None:
        super().__init__()
        self.first = nn.LayerNorm(WIDTH)
        self.second = nn.LayerNorm(WIDTH, eps=1e-2 if fault == "norm-eps" else 1e-5)
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mixture = _Together(fault) if how == "together" else _Loop(fault, how)

    def forward(self, x: Tensor) -> Tensor:
        heads = (z.unflatten(-1, (3, -1)).transpose(1, 2) for z in self.qkv(self.first(x)).chunk(3, -1))
        x = x + self.o(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mixture(self.second(x))


class Mixtures(nn.Module):
    """``ids`` → logits; ``fault`` in the second layer."""

    def __init__(self, how: str, fault: str = "") -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(_Layer(fault if i else "", how) for i in range(LAYERS))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.table.weight.T


def alike(model: Mixtures, how: str, fault: str = "") -> Mixtures:
    """Another style with the weights of a loop."""
    other, values = Mixtures(how, fault), dict(model.state_dict())
    if how == "together":
        for i in range(LAYERS):
            start = f"layers.{i}.mixture."
            own = {n: values.pop(n) for n in list(values) if n.startswith(start)}

            def stack(name: str, own: dict[str, Tensor] = own, start: str = start) -> Tensor:
                return torch.stack([own[f"{start}experts.{e}.{name}"] for e in range(EXPERTS)])

            values[start + "router"] = own[start + "router.weight"].T
            values[start + "up"] = torch.stack([stack("gate.weight"), stack("up.weight")], 1).mT
            values[start + "up_bias"] = torch.stack([stack("gate.bias"), stack("up.bias")], 1)
            values[start + "down"], values[start + "down_bias"] = stack("down.weight").mT, stack("down.bias")
    other.load_state_dict(values)
    return other.eval()
