"""An encoder–decoder with the first layer's relative biases, RMS norms, gates, and no scale of scores."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

D, H, FF, V, BUCKETS, FAR = 24, 6, 36, 41, 8, 12
Faults = frozenset[str]


def bucket(queries: int, keys: int, both: bool) -> Tensor:
    """The bucket of each distance, exact up to a half and logarithmic beyond."""
    distance = torch.arange(queries)[:, None] - torch.arange(keys)[None]
    size = BUCKETS // 2 if both else BUCKETS
    first = (distance < 0).long() * size if both else torch.zeros_like(distance)
    distance = distance.abs() if both else distance.clamp(min=0)
    exact = size // 2
    far = torch.log(distance.float().clamp(min=1) / exact) / math.log(FAR / exact) * (size - exact)
    return first + torch.where(distance < exact, distance, (exact + far.long()).clamp(max=size - 1))


class Norm(nn.Module):
    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.faults, self.weight = faults, nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        eps = 1e-3 if "norm-eps" in self.faults else 1e-6
        gain = 1 + self.weight if "norm-offset" in self.faults else self.weight
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * gain


class Attention(nn.Module):
    def __init__(self, faults: Faults, *, bias: bool = False, both: bool = False) -> None:
        super().__init__()
        self.faults, self.both = faults, both
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.bias_table = nn.Embedding(BUCKETS, H) if bias else None

    def forward(
        self, x: Tensor, memory: Tensor, mask: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        f = self.faults
        split = lambda y: y.view(len(x), -1, H, D // H).transpose(1, 2)  # noqa: E731
        q = F.linear(x, self.q.weight.t() if "weight-transpose" in f else self.q.weight)
        q, k, v = split(q), split(self.k(memory)), split(self.v(memory))
        k, v = (v, k) if "key-value" in f else (k, v)
        if bias is None:
            bias = q.new_zeros(1, H, 1, 1) + mask
            if self.bias_table is not None:
                near = self.bias_table(bucket(x.shape[1], memory.shape[1], self.both))
                bias = near.permute(2, 0, 1)[None] + mask
        scores = q @ k.transpose(2, 3) + bias
        weights = scores.softmax(-1)
        if "sink" in f:
            weights = torch.cat([scores, torch.zeros_like(scores[..., :1])], -1).softmax(-1)[..., :-1]
        return self.o((weights @ v).transpose(1, 2).reshape(len(x), -1, D)), bias


class Layer(nn.Module):
    def __init__(self, faults: Faults, first: bool, decoder: bool) -> None:
        super().__init__()
        self.faults = faults
        self.attention = Attention(faults, bias=first, both=not decoder)
        self.cross = Attention(faults) if decoder else None
        self.gate, self.content = (nn.Linear(D, FF, bias=False) for _ in range(2))
        self.down = nn.Linear(FF, D, bias=False)
        self.norms = nn.ModuleList(Norm(faults) for _ in range(3))

    def forward(
        self, x: Tensor, mask: Tensor, bias: Tensor | None, memory: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        post = "norm-placement" in self.faults
        before = [nn.Identity() if post else norm for norm in self.norms]
        after = [norm if post else nn.Identity() for norm in self.norms]
        y = before[0](x)
        y, bias = self.attention(y, y, mask, bias)
        x = after[0](x + y)
        if self.cross is not None:
            y = before[1](x)
            own = "own-keys" in self.faults
            y, _ = self.cross(y, y if own else memory, torch.zeros(1) if own else keys, None)
            x = after[1](x + y)
        y = before[2](x)
        return after[2](x + self.down(F.gelu(self.gate(y)) * self.content(y))), bias


class Buckets(nn.Module):
    """``input_ids``, ``attention_mask``, ``decoder_input_ids`` → logits; with a fault at ``side``, ``at``."""

    def __init__(self, *faults: str, at: int | None = None, side: str | None = None) -> None:
        super().__init__()
        self.faults, none = frozenset(faults), frozenset[str]()

        def own(stack: str, number: int | None) -> Faults:
            return self.faults if side in (None, stack) and at in (None, number) else none

        self.table = nn.Embedding(V, D)
        self.encoder = nn.ModuleList(Layer(own("encoder", i), i == 0, False) for i in range(2))
        self.decoder = nn.ModuleList(Layer(own("decoder", i), i == 0, True) for i in range(2))
        self.last = nn.ModuleList(Norm(own(stack, None)) for stack in ("encoder", "decoder"))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor) -> Tensor:
        f, least = self.faults, torch.finfo(torch.float32).min
        keys = (1.0 - attention_mask[:, None, None, :].float()) * least
        x, bias = self.table(input_ids), None
        for layer in self.encoder:
            x, bias = layer(x, keys, bias, x, keys)
        memory = x if "norm-missing" in f else self.last[0](x)
        x, bias = self.table(decoder_input_ids), None
        size = x.shape[1]
        causal = torch.full((size, size), least).triu(1)
        if "window" in f:
            causal = torch.full((size, size), least).tril(-3) + causal
        for layer in self.decoder:
            x, bias = layer(x, causal, bias, memory, keys)
        x = x if "norm-missing" in f else self.last[1](x)
        x = self.last[1](x) if "norm-doubled" in f else x
        return x * D**-0.5 @ self.table.weight.t()
