"""A post-norm encoder of wrappers and lambdas: ``PostNorm(Residual(fn))``, one packed projection, a pool."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

D, H, FF, V = 24, 6, 40, 37
Faults = frozenset[str]


class Norm(nn.Module):
    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.eps = 1e-3 if "norm-eps" in faults else 1e-5
        self.gamma_weight, self.beta = nn.Parameter(torch.ones(D)), nn.Parameter(torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (D,), self.gamma_weight, self.beta, self.eps)


class Residual(nn.Module):
    def __init__(self, fn: nn.Module, faults: Faults) -> None:
        super().__init__()
        self.fn, self.faults = fn, faults

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        return self.fn(x, *rest) if "skip-missing" in self.faults else self.fn(x, *rest) + x


class PostNorm(nn.Module):
    def __init__(self, fn: Residual, faults: Faults) -> None:
        super().__init__()
        self.fn, self.norm, self.faults = fn, Norm(faults), faults

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        y = self.fn(x, *rest)
        y = y if "norm-missing" in self.faults else self.norm(y)
        return self.norm(y) if "norm-doubled" in self.faults else y


class Attention(nn.Module):
    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.faults = faults
        self.to_qkv = nn.Linear(D, 3 * D)
        self.to_out = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.1))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        f, (b, n, _) = self.faults, x.shape
        qkv = self.to_qkv(x)
        if "bias-missing" in f:  # taken off again
            qkv = qkv - F.pad(self.to_qkv.bias[2 * D :], (2 * D, 0))
        q, k, v = qkv.view(b, n, 3, H, D // H).permute(2, 0, 3, 1, 4)
        k = F.pad(k, (0, 0, 1, 0))[:, :, :-1] if "token-shift" in f else k
        dots = torch.einsum("bhid,bhjd->bhij", q, k) * (D // H) ** -0.5
        least = -torch.finfo(dots.dtype).max
        dots = dots.masked_fill(~mask[:, None, None, :], least)
        if "window" in f:
            places = torch.arange(n)
            dots = dots.masked_fill((places[None] - places[:, None]).abs() > 2, least)
        out = torch.einsum("bhij,bhjd->bhid", dots.softmax(-1), v)
        return self.to_out(out.permute(0, 2, 1, 3).reshape(b, n, D))


class Lambda(nn.Module):
    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, FF), Lambda(lambda x: F.gelu(x)), nn.Linear(FF, D))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.net(x)


class Layer(nn.Module):
    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.first, self.second = (
            PostNorm(Residual(fn, faults), faults) for fn in (Attention(faults), FeedForward())
        )


class Sequential(nn.Module):
    """``x`` ids, ``types`` of tokens, ``mask`` True = real → one logit vector a row."""

    def __init__(self, *faults: str, at: int | None = None, pool: str = "first") -> None:
        super().__init__()
        self.faults, self.at, self.pool = frozenset(faults), at, pool
        own = [self.faults if at in (None, i) else frozenset[str]() for i in range(2)]
        self.token_table = nn.Embedding(V, D)
        self.places, self.type_table = nn.Parameter(torch.zeros(1, 40, D)), nn.Embedding(2, D)
        self.norm = Norm(frozenset())
        self.layers = nn.ModuleList(Layer(f) for f in own)
        self.mlp_head = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 5))

    def forward(self, x: Tensor, types: Tensor, mask: Tensor) -> Tensor:
        f = self.faults
        x = x.roll(1, 1) if "ids-shift" in f else x
        places = torch.arange(x.shape[1])
        places = (mask.long().cumsum(1) - 1).clamp(min=0) if "position-padding" in f else places
        y = self.norm(self.token_table(x) + self.places[0][places] + self.type_table(types))
        layers: list[Layer] = list(self.layers)  # type: ignore[assignment]
        layers = layers[::-1] if "layer-order" in f else layers
        layers = [layers[0], layers[0]] if "layer-twice" in f else layers
        for number, layer in enumerate(layers):
            attention, feed_forward = layer.first, layer.second
            if "parallel-residual" in f and self.at in (None, number):
                y = feed_forward.norm(y + attention.fn.fn(y, mask) + feed_forward.fn.fn(y, mask))
            else:
                y = attention(y, mask)
                late = "norm-late" in f and number == 1
                y = feed_forward.fn(y, mask) if late else feed_forward(y, mask)
        pool = {"first": "mean", "mean": "first"}[self.pool] if "pooling" in f else self.pool
        real = mask[..., None].to(y)
        row = y[:, 0] if pool == "first" else (y * real).sum(1) / real.sum(1)
        return self.mlp_head(layers[-1].second.norm(row) if "norm-late" in f else row)
