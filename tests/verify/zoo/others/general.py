"""BERT with kernels of many axes, ``[d, heads, k]`` and ``[heads, k, d]``; learned positions or ALiBi."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

D, H, K, FF, V = 30, 5, 6, 48, 35


class DenseGeneral(nn.Module):
    def __init__(self, inner: tuple[int, ...], outer: tuple[int, ...]) -> None:
        super().__init__()
        self.axes = len(inner)
        self.kernel, self.bias = nn.Parameter(torch.zeros(*inner, *outer)), nn.Parameter(torch.zeros(outer))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tensordot(x, self.kernel, self.axes) + self.bias


class Dense(nn.Module):
    def __init__(self, n: int, m: int) -> None:
        super().__init__()
        self.kernel, self.bias = nn.Parameter(torch.zeros(n, m)), nn.Parameter(torch.zeros(m))

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.kernel).add(self.bias)


class Norm(nn.Module):
    def __init__(self, faults: frozenset[str]) -> None:
        super().__init__()
        self.faults, self.scale, self.bias = faults, nn.Parameter(torch.ones(D)), nn.Parameter(torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        eps = 1e-3 if "norm-eps" in self.faults else 1e-12
        mean = x.mean(-1, keepdim=True)
        var = (x * x).mean(-1, keepdim=True) - mean * mean
        y = (x - mean) * torch.rsqrt(var + eps) * self.scale
        return y if "norm-bias" in self.faults else y + self.bias


class Layer(nn.Module):
    def __init__(self, faults: frozenset[str]) -> None:
        super().__init__()
        self.faults = faults
        self.query, self.key, self.value = (DenseGeneral((D,), (H, K)) for _ in range(3))
        self.out = DenseGeneral((H, K), (D,))
        self.wi, self.wo = Dense(D, FF), Dense(FF, D)
        self.norm_1, self.norm_2 = Norm(faults), Norm(faults)

    def attend(self, x: Tensor, bias: Tensor) -> Tensor:
        f = self.faults
        q, k, v = self.query(x), self.key(x), self.value(x)
        if "bias-missing" in f:
            v = torch.tensordot(x, self.value.kernel, 1)
        if "attention-scale" not in f:
            q = q / K**0.5
        w = torch.einsum("...qhd,...khd->...hqk", q, k) + bias
        w = w - w.amax(-1, keepdim=True)
        w = w.exp() / w.exp().sum(-1, keepdim=True) if "written-softmax" in f else F.softmax(w, -1)
        if "weights-shift" in f:
            w = w.roll(1, -1)
        y = torch.einsum("...hqk,...khd->...qhd", w, v)
        if "head-merge" in f:
            y = y.transpose(1, 2).reshape_as(y)
        return self.out(y)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        f = self.faults
        y = self.attend(x, bias)
        x = y + x if "norm-missing-layer" in f else self.norm_1(y + x)
        z = self.wi(x)
        z = F.relu(z) if "activation" in f else 0.5 * z * (1 + torch.erf(z / 2**0.5))
        y = self.wo(z)
        return self.norm_2(y if "skip-missing" in f else y + x)


class Bert(nn.Module):
    """``input_ids``, ``attention_mask`` → hidden vectors or, with ``pooled``, one logit vector a row."""

    def __init__(
        self, *faults: str, at: int | None = None, alibi: bool = False, pooled: bool = False
    ) -> None:
        super().__init__()
        self.faults, self.alibi, self.pooled = frozenset(faults), alibi, pooled
        self.word, self.position = nn.Embedding(V, D), nn.Embedding(40, D)
        self.kind = nn.Embedding(2, D)
        self.norm = Norm(self.faults if at is None else frozenset())
        self.layers = nn.ModuleList(Layer(self.faults if at in (None, i) else frozenset()) for i in range(2))
        self.pooler, self.classifier = Dense(D, D), Dense(D, 7)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        f, t = self.faults, input_ids.shape[1]
        x = self.word(input_ids)
        if "kind-missing" not in f:
            x = x + self.kind(torch.zeros_like(input_ids))
        if not self.alibi:
            x = x + self.position(torch.arange(t) + (1 if "position-offset" in f else 0))
        if "norm-missing" not in f:
            x = self.norm(x)
        bias = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * -1e9
        if "mask-polarity" in f:
            bias = torch.zeros_like(bias)
        if self.alibi:
            slope = 2.0 ** (-torch.arange(1, H + 1) * (1.0 if "alibi-slope" in f else 8 / H))
            bias = bias - slope[:, None, None].to(x) * (torch.arange(t) - torch.arange(t)[:, None]).abs()
        for layer in self.layers:
            x = layer(x, bias)
        if not self.pooled:
            return {"last_hidden_state": x}
        row = x.mean(1) if "pooling" in f else x[:, 0]
        row = self.pooler(row)
        return {"logits": self.classifier(row.relu() if "pooler-activation" in f else row.tanh())}
