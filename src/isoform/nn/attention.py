"""Multi-head, grouped-query and multi-query attention, self and cross (6.1–6.2, R2, R42)."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from isoform import config
from isoform.errors import ConfigError, ShapeError
from isoform.nn.cache import LayerCache
from isoform.nn.capture import tap, wanted
from isoform.nn.dropout import dropout
from isoform.nn.exact import elsewhere
from isoform.nn.kernels import Heads, flex, fused
from isoform.nn.linear import Linear, Packed
from isoform.nn.norms import norm
from isoform.nn.positions import rotate
from isoform.nn.reading import Reading

Backend = Literal["auto", "eager", "sdpa", "flex"]
EAGER_UP_TO = 64
"""Positions up to which "auto" writes attention out on a CPU when a gradient is wanted."""
ELSEWHERE = 255
"""The same where products are oneDNN's, with a gradient or without, …"""
SCORES = 2**25
"""… up to so many scores."""
FLEX_FROM = 1024 * 1024
"""Query-key pairs from which on "auto" avoids a dense mask on CUDA."""


class Attention(nn.Module):
    """softmax(Q Kᵀ · scale + M) V Wo, the softmax over keys.

    ``backend`` "eager" writes scores and weights out, "sdpa" uses PyTorch's fused kernels, "auto" picks the
    faster of the two that can express the configuration; they are the same function.
    """

    def __init__(self, cfg: config.Attention, d_model: int, *, cross: bool) -> None:
        super().__init__()
        self.cfg = cfg
        self.cross = cross
        self.backend: Backend = "auto"
        q_width, kv_width = cfg.n_heads * cfg.head_width, cfg.n_kv_heads * cfg.head_width
        bias = cfg.bias
        if cross:
            self.query = Linear(d_model, q_width, bias=bias.query)
            self.key_value = Packed(
                d_model, {"key": kv_width, "value": kv_width}, {"key": bias.key, "value": bias.value}
            )
        else:
            self.qkv = Packed(
                d_model,
                {"query": q_width, "key": kv_width, "value": kv_width},
                {"query": bias.query, "key": bias.key, "value": bias.value},
            )
        self.output = Linear(q_width, d_model, bias=bias.output)
        qk = cfg.qk_norm
        per_head = qk is not None and qk.axis == "head"
        self.query_norm = norm(qk.norm if qk else None, cfg.head_width if per_head else q_width)
        self.key_norm = norm(qk.norm if qk else None, cfg.head_width if per_head else kv_width)

    def forward(
        self,
        x: Float[Tensor, "batch query d_model"],
        reading: Reading,
        memory: Float[Tensor, "batch key d_model"] | tuple[Heads, Heads] | None = None,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "batch query d_model"]:
        """Read.

        Args:
            x: the query side.
            reading: masks, rotation and bias of this pass.
            memory: for cross-attention the key side: hidden states, or keys and values already projected.
            cache: for self-attention the tokens read before; the new ones are written into it.
        """
        if self.cross:
            q = self._heads(self.query(x), self.cfg.n_heads)
            if memory is None:
                raise ShapeError("cross-attention needs the memory of the source")
            k, v = memory if isinstance(memory, tuple) else self.project_memory(memory)
            if k.shape[0] != x.shape[0]:
                raise ShapeError(
                    f"queries of shape {list(x.shape)} cannot read a memory of {k.shape[0]} rows"
                )
            q = self._normed(q, self.query_norm)
        else:
            q, k, v = self._self_heads(x, reading)
            if cache is not None:
                assert reading.slots is not None
                cache.write(k, v, reading.slots, reading.start)
                if not reading.fresh:
                    k, v = cache.keys[:, :, : reading.visible], cache.values[:, :, : reading.visible]
            if reading.rotary_keys is not None:
                k = self._rotated(k, reading.rotary_keys)
        q, k, v = tap(self, "queries", q), tap(self, "keys", k), tap(self, "values", v)
        context = self._attend(q, k, v, reading)
        merged = context.transpose(1, 2).flatten(-2)
        return self.output(tap(self, "context", merged))

    def project_memory(self, memory: Float[Tensor, "batch key d_model"]) -> tuple[Heads, Heads]:
        """Keys and values of a memory, to be computed once for a source and read at every step."""
        k, v = (self._heads(part, self.cfg.n_kv_heads) for part in self.key_value.project(memory))
        return self._normed(k, self.key_norm), v

    def _self_heads(self, x: Tensor, reading: Reading) -> tuple[Heads, Heads, Heads]:
        cfg = self.cfg
        h, kv = cfg.n_heads, cfg.n_kv_heads
        at_reading = reading.rotary_keys is not None
        if cfg.qk_norm is None and cfg.n_heads * cfg.head_width == self.qkv.parts["query"]:
            heads = self.qkv(x).unflatten(-1, (h + 2 * kv, cfg.head_width)).transpose(1, 2)
            # Split, not sliced: its gradient is one concatenation, a slice's is as large as the whole.
            if reading.rotary is None:
                return heads.split((h, kv, kv), 1)
            if at_reading:
                q, k, v = heads.split((h, kv, kv), 1)
                return self._rotated(q, reading.rotary), k, v
            both, v = heads.split((h + kv, kv), 1)
            q, k = self._rotated(both, reading.rotary).split((h, kv), 1)
            return q, k, v
        q, k, v = self.qkv.project(x)
        q, k, v = self._heads(q, h), self._heads(k, kv), self._heads(v, kv)
        late = cfg.qk_norm is not None and cfg.qk_norm.order == "after_rotation"
        if not late:
            q, k = self._normed(q, self.query_norm), self._normed(k, self.key_norm)
        if reading.rotary is not None:
            q = self._rotated(q, reading.rotary)
            k = k if at_reading else self._rotated(k, reading.rotary)
        if late:
            q, k = self._normed(q, self.query_norm), self._normed(k, self.key_norm)
        return q, k, v

    def _heads(self, x: Float[Tensor, "batch length total"], n: int) -> Heads:
        return x.unflatten(-1, (n, self.cfg.head_width)).transpose(1, 2)

    def _normed(self, x: Heads, norm: nn.Module) -> Heads:
        if self.cfg.qk_norm is None:
            return x
        if self.cfg.qk_norm.axis == "head":
            return norm(x)
        return self._heads(norm(x.transpose(1, 2).flatten(-2)), x.shape[1])

    def _rotated(self, x: Heads, table: tuple[Tensor, Tensor]) -> Heads:
        assert isinstance(self.cfg.positions, config.Rotary)
        return rotate(x, table, self.cfg.positions.layout)

    def _attend(self, q: Heads, k: Heads, v: Heads, reading: Reading) -> Heads:
        if q.device.type == "cpu" and v.dtype in (torch.bfloat16, torch.float16):
            # Most CPUs multiply small half-precision matrices several times slower than float32 ones.
            with torch.autocast("cpu", enabled=False):
                return self._computed(q.float(), k.float(), v.float(), reading).to(v.dtype)
        return self._computed(q, k, v, reading)

    def _computed(self, q: Heads, k: Heads, v: Heads, reading: Reading) -> Heads:
        cfg = self.cfg
        share = cfg.dropout if self.training else 0.0
        kernel = "eager" if wanted(self, "scores", "weights") else self._kernel(q, reading, share)
        if kernel == "flex":
            if share:
                raise ConfigError("FlexAttention cannot drop attention weights: set attention dropout to 0")
            return flex(q, k, v, reading, scale=cfg.score_scale, softcap=cfg.softcap)
        if kernel == "sdpa":
            return fused(q, k, v, reading, scale=cfg.score_scale, dropout=share)
        return self._eager(q, k, v, reading)

    def _kernel(self, q: Heads, reading: Reading, share: float) -> Backend:
        cfg, bias, lowered = self.cfg, reading.bias, reading.lowered
        if self.backend != "auto":
            return "eager" if self.backend == "sdpa" and cfg.softcap is not None else self.backend
        trained = bias is not None and bias.trained and torch.is_grad_enabled()
        if q.is_cuda and not (share or trained) and lowered.key.length * q.shape[2] >= FLEX_FROM:
            # FlexAttention's kernels want head widths that are powers of two, and no float64.
            fits = cfg.head_width >= 16 and cfg.head_width & (cfg.head_width - 1) == 0
            if fits and q.dtype != torch.float64 and (cfg.softcap or bias or lowered.by_pair):
                return "flex"
        # The fused entry point has no cap. With a bias that has a gradient, or with dropout on a CPU, it
        # stores the weights too, and more than is needed. On a CPU's short rows its backward pass is slow: at
        # 8 to 64 positions, writing the weights out took 0.35 to 0.99 of its time with heads 4 × 32, 4 × 48
        # and 8 × 64 on two threads (1.2 at 8 × 64 and 64 positions). Its many small products make oneDNN
        # slow: with AVX-512 written-out weights took 0.15 to 0.7 of its time at 32 to 256 positions, 0.12 to
        # 0.5 with the backward pass, in float32; in bfloat16 0.35 to 0.5 and 0.23 to 0.45.
        longest = max(q.shape[2], lowered.key.length)
        if elsewhere():
            short = longest <= ELSEWHERE and q.shape[:3].numel() * lowered.key.length <= SCORES
        else:
            short = longest <= EAGER_UP_TO and torch.is_grad_enabled() and q.requires_grad
        slow = q.device.type == "cpu" and (share > 0.0 or short)
        return "eager" if cfg.softcap is not None or trained or slow else "sdpa"

    def _eager(self, q: Heads, k: Heads, v: Heads, reading: Reading) -> Heads:
        batch, h, t, width = q.shape
        kv = k.shape[1]
        grouped = q.reshape(batch, kv, h // kv * t, width)  # heads of one group read the same keys
        scores = ((grouped * self.cfg.score_scale) @ k.transpose(-1, -2)).view(batch, h, t, -1)
        if self.cfg.softcap is not None:
            scores = torch.tanh(scores / self.cfg.softcap) * self.cfg.softcap
        bias, mask = reading.biased(scores.dtype), reading.masked(scores.dtype)
        scores = tap(self, "scores", scores if bias is None else scores + bias)
        if mask is not None:
            scores = scores + mask
        half = scores.dtype in (torch.float16, torch.bfloat16)
        weights = F.softmax(scores, -1, dtype=torch.float32).to(scores.dtype) if half else scores.softmax(-1)
        alive = reading.lowered.alive
        if alive is not None and wanted(self, "weights"):
            weights = weights * alive.to(weights.dtype)
        weights = dropout(tap(self, "weights", weights), self.cfg.dropout, self.training)
        context = (weights.view(batch, kv, h // kv * t, -1) @ v).view(batch, h, t, width)
        return context if alive is None else context * alive.to(context.dtype)

    def extra_repr(self) -> str:
        cfg = self.cfg
        heads = f"heads={cfg.n_heads}/{cfg.n_kv_heads}×{cfg.head_width}"
        return f"{heads}, scale={cfg.score_scale:g}, backend={self.backend}"
