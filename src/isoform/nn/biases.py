"""What positions add to attention scores: slopes (ALiBi) and learned distance buckets (T5)."""

from __future__ import annotations

import dataclasses
import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from isoform import config
from isoform.nn.reading import Pair


def alibi_slopes(n_heads: int) -> list[float]:
    """Slope of each head (Press et al. 2021): powers of 2^(-8/n), completed as the paper's code does."""
    power = 2 ** math.floor(math.log2(n_heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-8.0 * (2 * i + 1) / (2 * power)) for i in range(n_heads - power)]
    return slopes


def _float32_slopes(n_heads: int) -> Float[Tensor, " h"]:
    """The slopes as powers taken in float32, which is how rounded biases are published."""
    power = 2 ** math.floor(math.log2(n_heads))
    base, between = (torch.tensor(2.0 ** (-8.0 / n), dtype=torch.float32) for n in (power, 2 * power))
    whole = base ** torch.arange(1, power + 1, dtype=torch.int32)
    odd = torch.arange(1, max(2 * (n_heads - power), 1), 2, dtype=torch.int32)
    return torch.cat([whole, between**odd])


@dataclasses.dataclass(frozen=True, eq=False)
class AlibiBias:
    """-slope · |i - j| for every head; slope · j where the configuration says that it is rounded."""

    cfg: config.Alibi
    n_heads: int
    query: Int[Tensor, "rows query"]
    key: Int[Tensor, "rows key"]
    trained: bool = False

    def dense(self, dtype: torch.dtype) -> Float[Tensor, "rows h query key"]:
        """The bias of every (query, key) pair."""
        slopes = self._slopes(dtype)[:, None, None]
        if self.cfg.rounding != "none":
            bias = self._rounded(slopes, self.key[:, None, None, :], dtype)
            return bias.expand(-1, -1, self.query.shape[-1], -1)
        return -(slopes * (self.query[:, None, :, None] - self.key[:, None, None, :]).abs())

    def by_pair(self, dtype: torch.dtype) -> Pair:
        """The bias as a function of (batch, head, query, key) indices."""
        slopes = self._slopes(dtype)

        def bias(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            key = _pick(self.key, b, k)
            if self.cfg.rounding != "none":
                return self._rounded(slopes[h], key, dtype)
            return -(slopes[h] * (_pick(self.query, b, q) - key).abs())

        return bias

    def _slopes(self, dtype: torch.dtype) -> Float[Tensor, " h"]:
        if self.cfg.rounding != "none":
            return _float32_slopes(self.n_heads).to(self.key.device)
        slopes = torch.tensor(alibi_slopes(self.n_heads), dtype=torch.float64, device=self.key.device)
        return (slopes * self.cfg.factor).to(dtype)

    def _rounded(self, slopes: Tensor, key: Tensor, dtype: torch.dtype) -> Tensor:
        narrow = torch.bfloat16 if self.cfg.rounding == "bfloat16" else torch.float32
        return (slopes.to(narrow) * key.to(narrow)).to(dtype) * self.cfg.factor


class RelativeBias(nn.Module):
    """A learned score per head and distance bucket, one table for all layers of a stack (T5)."""

    def __init__(self, cfg: config.RelativeBuckets, n_heads: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.weight = nn.Parameter(torch.empty(cfg.n_buckets, n_heads))

    def forward(self, query: Int[Tensor, "rows query"], key: Int[Tensor, "rows key"]) -> BucketBias:
        """The bias between these places."""
        return BucketBias(self.cfg, self.weight, query, key, self.weight.requires_grad)


@dataclasses.dataclass(frozen=True, eq=False)
class BucketBias:
    """weight[bucket of j - i, head]."""

    cfg: config.RelativeBuckets
    weight: Float[Tensor, "buckets h"]
    query: Int[Tensor, "rows query"]
    key: Int[Tensor, "rows key"]
    trained: bool

    def dense(self, dtype: torch.dtype) -> Float[Tensor, "rows h query key"]:
        """The bias of every (query, key) pair."""
        buckets = relative_buckets(self.cfg, self.key[:, None, :] - self.query[:, :, None])
        return nn.functional.embedding(buckets, self.weight).permute(0, 3, 1, 2).to(dtype)

    def by_pair(self, dtype: torch.dtype) -> Pair:
        """The bias as a function of (batch, head, query, key) indices."""
        weight = self.weight.to(dtype)

        def bias(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            ahead = _pick(self.key, b, k) - _pick(self.query, b, q)
            return weight[relative_buckets(self.cfg, ahead), h]

        return bias


def _pick(index: Int[Tensor, "rows length"], b: Tensor, t: Tensor) -> Tensor:
    return index[b if index.shape[0] > 1 else b * 0, t]


def relative_buckets(cfg: config.RelativeBuckets, ahead: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """The bucket of a signed distance key - query (Raffel et al. 2020; float32 logarithm as published)."""
    n = cfg.n_buckets // 2 if cfg.bidirectional else cfg.n_buckets
    bucket = (ahead > 0).long() * n if cfg.bidirectional else torch.zeros_like(ahead)
    distance = ahead.abs() if cfg.bidirectional else (-ahead).clamp(min=0)
    exact = n // 2
    coarse = exact + (
        torch.log(distance.clamp(min=1).float() / exact) / math.log(cfg.max_distance / exact) * (n - exact)
    ).long().clamp(max=n - 1 - exact)
    return bucket + torch.where(distance < exact, distance, coarse)
