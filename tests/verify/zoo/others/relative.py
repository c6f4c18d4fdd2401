"""Narrow embeddings that are widened, scores with terms by distance; tokens packed, biases kept together."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

D, E, H, K, FF, V, FAR = 30, 12, 5, 6, 44, 35, 4


class Layer(nn.Module):
    def __init__(self, faults: frozenset[str]) -> None:
        super().__init__()
        self.faults = faults
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.by_query, self.by_key = (nn.Parameter(torch.zeros(2 * FAR + 1, K)) for _ in range(2))
        self.fixed = nn.Parameter(torch.zeros(H, 2 * FAR + 1))
        self.norm_1, self.norm_2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.wi, self.wo = nn.Linear(D, FF), nn.Linear(FF, D)

    def distances(self, n: int, mirrored: bool, far: int) -> Tensor:
        d = torch.arange(n) - torch.arange(n)[:, None]
        return (-d if mirrored else d).clamp(-far, far) + FAR

    def scores(self, x: Tensor, bias: bool) -> Tensor:
        f, n = self.faults, x.shape[1]
        q, k = (p(x).view(*x.shape[:2], H, K).transpose(1, 2) for p in (self.q, self.k))
        seen = self.distances(n, "mirrored-query" in f, 2 if "near-query" in f else FAR)
        by_query = torch.einsum("bhqc,qkc->bhqk", q, self.by_query[seen])
        seen = self.distances(n, "mirrored-key" in f, FAR)
        by_key = torch.einsum("bhkc,qkc->bhqk", k, self.by_key[seen])
        fixed = self.fixed[:, self.distances(n, False, FAR)] if bias else 0.0
        if "content-scale" in f:
            return (q @ k.transpose(-1, -2) + by_query + by_key) / 3 + fixed
        if "no-query" in f:
            by_query = 0.0
        s = (q @ k.transpose(-1, -2) + by_query + by_key) / K**0.5 + fixed
        return s * 1.3 if "scale-all" in f else s

    def forward(self, x: Tensor, allowed: Tensor, real: Tensor, bias: bool, packed: Tensor | None) -> Tensor:
        f = self.faults
        s = self.scores(x, bias)
        w = s.masked_fill(~allowed[:, None], torch.finfo(s.dtype).min).softmax(-1)
        if "quiet-padding" in f:
            w = w * real[:, None, :, None]
        if "late-scale" in f:
            w = 1.2 * w
        y = (w @ self.v(x).view(*x.shape[:2], H, K).transpose(1, 2)).transpose(1, 2).flatten(2)
        if packed is not None:
            y = y @ self.o.weight.t() + packed[0]
        else:
            y = self.o(y)
        x = self.norm_1(x + y)
        if "norm-factor" in f:
            x = 1.5 * x
        if "zeroed-padding" in f:
            x = x.masked_fill(~real[..., None], 0.0)
        tokens = x[real] if "unpadded" in f else x
        y = F.gelu(self.wi(tokens))
        y = y @ self.wo.weight.t() + packed[1] if packed is not None else self.wo(y)
        y = self.norm_2(tokens + y)
        if "unpadded" not in f:
            return y
        out = torch.zeros_like(x)
        out[real] = y
        return out


class Relative(nn.Module):
    """``ids``, ``real`` (and the lengths of prefixes) → hidden vectors and scores of the vocabulary."""

    def __init__(
        self,
        *faults: str,
        at: int | None = None,
        causal: bool = False,
        window: int | None = None,
        bias: bool = False,
        together: bool = False,
    ) -> None:
        super().__init__()
        self.faults = frozenset(faults)
        self.causal, self.window, self.bias = causal, window, bias
        self.table, self.widen = nn.Embedding(V, E), nn.Linear(E, D)
        self.layers = nn.ModuleList(Layer(self.faults if at in (None, i) else frozenset()) for i in range(3))
        self.narrow, self.out = nn.Linear(D, E), nn.Parameter(torch.zeros(V))
        if together:
            self.biases = nn.Parameter(torch.zeros(3, 2, D))

    def keep_together(self) -> None:
        """Move the biases of what is added to the stream into one tensor."""
        with torch.no_grad():
            for i, layer in enumerate(self.layers):
                self.biases[i, 0], self.biases[i, 1] = layer.o.bias, layer.wo.bias

    def allowed(self, real: Tensor, prefix: Tensor | None) -> Tensor:
        f, n = self.faults, real.shape[1]
        q, k = torch.arange(n)[:, None], torch.arange(n)
        allowed = torch.ones(1, n, n, dtype=torch.bool)
        if self.causal:
            allowed = (k <= q)[None]
            if prefix is not None:
                more = {"prefix-long": 1, "prefix-short": -1}
                length = prefix + sum(more.get(x, 0) for x in f)
                allowed = allowed | (k < length[:, None, None])
                if "prefix-none" in f:
                    allowed = (k <= q)[None]
                if "prefix-queries" in f:  # only conditions read all of themselves
                    allowed = (k <= q)[None] | ((k < length[:, None, None]) & (q < length[:, None, None]))
        if self.window is not None:
            width = self.window + ("window" in f)
            ahead = 0 if self.causal else width
            shift = 1 if "window-shift" in f else 0
            allowed = allowed & (k > q - width + shift) & (k < q + max(ahead, 1) + shift)
        return allowed & real[:, None]

    def forward(self, ids: Tensor, real: Tensor, prefix_lengths: Tensor | None = None) -> dict[str, Tensor]:
        f = self.faults
        x = self.table(ids)
        if "embedding-scale" in f:
            x = x * E**0.5
        x = self.widen(x)
        if "widened-scale" in f:
            x = x * D**0.5
        if "zeroed-padding" in f:
            x = x * real[..., None]
        for i, layer in enumerate(self.layers):
            packed = self.biases[i] if hasattr(self, "biases") else None
            x = layer(x, self.allowed(real, prefix_lengths), real, self.bias, packed)
        logits = self.narrow(x) @ self.table.weight.t()
        if "logit-scale" in f:
            return {"hidden": x, "scores": logits * 0.5 + self.out}
        logits = logits + self.out
        return {"hidden": x, "scores": logits * 0.5 if "logit-scale-all" in f else logits}
