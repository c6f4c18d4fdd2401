"""Attention without its weights written out: PyTorch's fused entry point, and FlexAttention.

Both are the function that `Attention` writes out term by term; tests hold the three together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from isoform.errors import ConfigError
from isoform.nn.reading import Reading

Heads = Float[Tensor, "batch heads length width"]


def fused(q: Heads, k: Heads, v: Heads, reading: Reading, *, scale: float, dropout: float) -> Heads:
    """`torch.nn.functional.scaled_dot_product_attention`, rows that read nothing zeroed."""
    batch, h, t, width = q.shape
    kv = k.shape[1]
    causal = reading.lowered.is_causal and reading.bias is None
    added = reading.added(q.dtype)
    if h > kv and t == 1 and reading.bias is None:
        # One query a head: the heads of a group stand in for the query axis, so no key is repeated.
        q = q.reshape(batch, kv, h // kv, width)
        out = F.scaled_dot_product_attention(q, k, v, added, dropout, False, scale=scale)
        out = out.reshape(batch, h, 1, width)
    else:
        if h > kv:
            k, v = k.repeat_interleave(h // kv, 1), v.repeat_interleave(h // kv, 1)
        out = F.scaled_dot_product_attention(q, k, v, added, dropout, causal, scale=scale)
    alive = reading.lowered.alive
    return out if alive is None else out * alive.to(out.dtype)


def flex(q: Heads, k: Heads, v: Heads, reading: Reading, *, scale: float, softcap: float | None) -> Heads:
    """FlexAttention: mask and bias are functions of the indices, no matrix is built (R21).

    Raises:
        ConfigError: a gradient on the CPU, where FlexAttention has none.
    """
    from torch.nn.attention.flex_attention import flex_attention

    if q.device.type == "cpu" and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise ConfigError("FlexAttention has no gradient on the CPU: use attention 'sdpa' or 'eager'")
    attend = flex_attention
    if q.is_cuda and not torch.compiler.is_compiling():
        attend = _compiled()
    bias = None if reading.bias is None else reading.bias.by_pair(q.dtype)

    def change(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            score = torch.tanh(score / softcap) * softcap
        return score if bias is None else score + bias(b, h, i, j)

    return attend(
        q,
        k,
        v,
        score_mod=None if softcap is None and bias is None else change,
        block_mask=reading.lowered.block_mask(q.shape[0]),
        scale=scale,
        enable_gqa=q.shape[1] > k.shape[1],
    )


@functools.cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
