"""Multi-head, grouped-query and multi-query attention, self and cross (6.1–6.2, R2, R42)."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from isoform import config
from isoform.errors import ShapeError
from isoform.nn.cache import LayerCache
from isoform.nn.capture import tap, wanted
from isoform.nn.linear import Packed
from isoform.nn.norms import norm
from isoform.nn.positions import rotate
from isoform.visibility import Lowered

Backend = Literal["auto", "eager", "sdpa"]
Heads = Float[Tensor, "batch heads length width"]


@dataclasses.dataclass(frozen=True, eq=False)
class Reading:
    """What every attention of one kind shares in one forward pass, computed once for all layers.

    Args:
        lowered: who may read whom.
        rotary: cosines and sines of the queries' positions; None: no rotation.
        rotary_keys: those of the stored keys, where rotation happens at reading time (dynamic NTK).
        bias: ``[B | 1, h, T, S]`` added to the scores (ALiBi, distance buckets); mask not included.
        slots: ``[B, T]`` where new keys go in a cache.
        visible: how many slots of the cache are read.
        fresh: the cache was empty, so the new keys are all there are.
    """

    lowered: Lowered
    rotary: tuple[Tensor, Tensor] | None = None
    rotary_keys: tuple[Tensor, Tensor] | None = None
    bias: Float[Tensor, "rows h query key"] | None = None
    slots: Int[Tensor, "batch length"] | None = None
    visible: int | None = None
    fresh: bool = False


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
            self.query = nn.Linear(d_model, q_width, bias=bias.query)
            self.key_value = Packed(
                d_model, {"key": kv_width, "value": kv_width}, {"key": bias.key, "value": bias.value}
            )
        else:
            self.qkv = Packed(
                d_model,
                {"query": q_width, "key": kv_width, "value": kv_width},
                {"query": bias.query, "key": bias.key, "value": bias.value},
            )
        self.output = nn.Linear(q_width, d_model, bias=bias.output)
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
            q = self._normed(q, self.query_norm)
        else:
            q, k, v = self._self_heads(x, reading)
            if cache is not None:
                assert reading.slots is not None
                cache.write(k, v, reading.slots)
                if not reading.fresh:
                    k, v = cache.keys[:, :, : reading.visible], cache.values[:, :, : reading.visible]
            if reading.rotary_keys is not None:
                k = self._rotated(k, reading.rotary_keys)
        q, k, v = tap(self, "queries", q), tap(self, "keys", k), tap(self, "values", v)
        context = self._attend(q, k, v, reading)
        if reading.lowered.dead is not None:
            context = context.masked_fill(reading.lowered.dead, 0.0)
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
        if self.cfg.qk_norm is None or self.cfg.qk_norm.axis == "head":
            return norm(x)
        return self._heads(norm(x.transpose(1, 2).flatten(-2)), x.shape[1])

    def _rotated(self, x: Heads, table: tuple[Tensor, Tensor]) -> Heads:
        assert isinstance(self.cfg.positions, config.Rotary)
        return rotate(x, table, self.cfg.positions.layout)

    def _attend(self, q: Heads, k: Heads, v: Heads, reading: Reading) -> Heads:
        if self._explicit(reading):
            return self._eager(q, k, v, reading)
        return self._fused(q, k, v, reading)

    def _explicit(self, reading: Reading) -> bool:
        if self.cfg.softcap is not None or wanted(self, "scores", "weights"):
            return True
        # A bias that needs a gradient sends the fused entry point to its slowest path.
        trained_bias = reading.bias is not None and reading.bias.requires_grad and torch.is_grad_enabled()
        return self.backend == "eager" or (self.backend == "auto" and trained_bias)

    def _eager(self, q: Heads, k: Heads, v: Heads, reading: Reading) -> Heads:
        batch, h, t, width = q.shape
        kv = k.shape[1]
        grouped = q.reshape(batch, kv, h // kv * t, width)  # heads of one group read the same keys
        scores = (grouped @ k.transpose(-1, -2)).view(batch, h, t, -1) * self.cfg.score_scale
        if self.cfg.softcap is not None:
            scores = torch.tanh(scores / self.cfg.softcap) * self.cfg.softcap
        if reading.bias is not None:
            scores = scores + reading.bias
        scores = tap(self, "scores", scores)
        mask = reading.lowered.dense(t, scores.device)
        if mask is not None:
            # The lowest finite number, not -inf: a row that reads nothing stays finite and is zeroed after.
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        half = scores.dtype in (torch.float16, torch.bfloat16)
        weights = F.softmax(scores, -1, dtype=torch.float32).to(scores.dtype) if half else scores.softmax(-1)
        weights = tap(self, "weights", weights)
        weights = F.dropout(weights, self.cfg.dropout, self.training)
        return (weights.view(batch, kv, h // kv * t, -1) @ v).view(batch, h, t, width)

    def _fused(self, q: Heads, k: Heads, v: Heads, reading: Reading) -> Heads:
        lowered, cfg = reading.lowered, self.cfg
        t, group = q.shape[2], cfg.n_heads // cfg.n_kv_heads
        mask = lowered.mask if reading.bias is None else lowered.additive(reading.bias.to(q.dtype))
        dropout = cfg.dropout if self.training else 0.0
        if group > 1 and t == 1 and reading.bias is None:
            # One query a head: the heads of a group stand in for the query axis, so no key is repeated.
            q = q.reshape(q.shape[0], cfg.n_kv_heads, group, cfg.head_width)
            out = F.scaled_dot_product_attention(q, k, v, mask, dropout, False, scale=cfg.score_scale)
            return out.reshape(out.shape[0], cfg.n_heads, 1, cfg.head_width)
        if group > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        causal = lowered.is_causal and reading.bias is None
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=cfg.score_scale)

    def extra_repr(self) -> str:
        cfg = self.cfg
        return f"heads={cfg.n_heads}/{cfg.n_kv_heads}×{cfg.head_width}, scale={cfg.score_scale:g}, backend={self.backend}"
