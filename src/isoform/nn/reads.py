"""Attention of one new token a row, on the slices of `lanes`; the function of `attention.Attention`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from isoform import config
from isoform.nn.positions import rotate

Map = Callable[[Tensor], Tensor]
New = Float[Tensor, "batch kv queries width"]
Kept = Float[Tensor, "batch kv slots width"]

FEW_HEADS = 32
"""Pairs of row and head up to which PyTorch's fused attention beats two batched products at short lengths."""
LONG = 512
"""Slots from which on it does at any number of heads."""


@dataclasses.dataclass(frozen=True, eq=False)
class Near:
    """What the layers of one kind share in a step.

    Args:
        rotary: cosines and signed sines of the new tokens' positions.
        added: ``[N | 1, 1 | h, 1, n]`` added to the scores of a row's own slots.
        shared_added: ``[B, 1, 1, P]`` added to those of a shared prompt.
        outputs: rows that share a prompt and a source.
    """

    rotary: tuple[Tensor, Tensor] | None
    added: Tensor | None
    shared_added: Tensor | None
    outputs: int


class SelfRead:
    """Self-attention of new tokens ``[N, d]``, with its two affine maps.

    Args:
        cfg: of the module.
        qkv: its first map.
        output: its last one.
        norms: of queries and keys, where it has them.
    """

    def __init__(
        self, cfg: config.Attention, qkv: Map, output: Map, norms: tuple[Map | None, Map | None]
    ) -> None:
        self._qkv, self._output, self._norms = qkv, output, norms
        self._h, self._kv, self._width = cfg.n_heads, cfg.n_kv_heads, cfg.head_width
        self._scale, self._softcap = cfg.score_scale, cfg.softcap
        self._qk_norm = cfg.qk_norm
        self._layout = cfg.positions.layout if isinstance(cfg.positions, config.Rotary) else None

    def __call__(
        self,
        x: Float[Tensor, "rows d_model"],
        near: Near,
        new: tuple[Float[Tensor, "rows kv width"], Float[Tensor, "rows kv width"]],
        keys: Kept,
        values: Kept,
        shared: tuple[Kept, Kept] | None,
    ) -> Float[Tensor, "rows d_model"]:
        """Write the new keys and values to ``new``, which lies in ``keys`` and ``values``, and read."""
        h, kv, width = self._h, self._kv, self._width
        heads = self._qkv(x).view(-1, h + 2 * kv, width)
        if self._qk_norm is None and near.rotary is not None:
            assert self._layout is not None
            both, v = heads.split_with_sizes((h + kv, kv), 1)
            q, k = rotate(both, near.rotary, self._layout).split_with_sizes((h, kv), 1)
        else:
            q, k, v = heads.split_with_sizes((h, kv, kv), 1)
            if self._qk_norm is not None:
                q, k = self._normed(q, k, near)
        new[0].copy_(k)
        new[1].copy_(v)
        q = q.reshape(-1, kv, h // kv, width)
        if shared is None:
            context = attend(q, keys, values, near.added, self._scale, self._softcap)
        else:
            context = self._in_two(q, keys, values, shared, near)
        return self._output(context.reshape(-1, h * width))

    def _normed(self, q: Tensor, k: Tensor, near: Near) -> tuple[Tensor, Tensor]:
        assert self._qk_norm is not None
        late = self._qk_norm.order == "after_rotation"
        if not late:
            q, k = self._scaled(q, 0), self._scaled(k, 1)
        if near.rotary is not None:
            assert self._layout is not None
            q, k = rotate(q, near.rotary, self._layout), rotate(k, near.rotary, self._layout)
        return (self._scaled(q, 0), self._scaled(k, 1)) if late else (q, k)

    def _scaled(self, x: Tensor, which: int) -> Tensor:
        norm = self._norms[which]
        assert self._qk_norm is not None and norm is not None
        return norm(x) if self._qk_norm.axis == "head" else norm(x.flatten(1)).view(x.shape)

    def _in_two(self, q: New, keys: Kept, values: Kept, shared: tuple[Kept, Kept], near: Near) -> New:
        """One softmax over a prompt that several rows share and what each has read since."""
        prompt, k = shared[0].shape[2], near.outputs
        q = q * self._scale
        first = _capped(_fold(q, k) @ shared[0].transpose(-1, -2), self._softcap)
        if near.shared_added is not None:
            first = first + near.shared_added
        then = _capped(q @ keys.transpose(-1, -2), self._softcap)
        weights = torch.cat([_unfold(first, k), then], -1).softmax(-1)
        context = _fold(weights[..., :prompt], k) @ shared[1]
        return _unfold(context, k) + weights[..., prompt:] @ values


class CrossRead:
    """Cross-attention of new tokens ``[N, d]``; the outputs of one sample read one copy of its source."""

    def __init__(self, cfg: config.Attention, query: Map, output: Map, norm: Map | None) -> None:
        self._query, self._output, self._norm = query, output, norm
        self._h, self._kv, self._width = cfg.n_heads, cfg.n_kv_heads, cfg.head_width
        self._scale, self._softcap, self._qk_norm = cfg.score_scale, cfg.softcap, cfg.qk_norm

    def __call__(
        self,
        x: Float[Tensor, "rows d_model"],
        memory: tuple[Kept, Kept],
        added: Float[Tensor, "samples 1 1 source"] | None,
        outputs: int,
    ) -> Float[Tensor, "rows d_model"]:
        """Read the source."""
        q = self._query(x)
        if self._qk_norm is not None and self._norm is not None:
            q = self._norm(q if self._qk_norm.axis == "projection" else q.view(-1, self._h, self._width))
        q = q.view(-1, self._kv, self._h // self._kv, self._width)
        folded = _fold(q, outputs)
        context = _unfold(attend(folded, *memory, added, self._scale, self._softcap), outputs)
        return self._output(context.reshape(-1, self._h * self._width))


def attend(
    q: New, keys: Kept, values: Kept, added: Tensor | None, scale: float, softcap: float | None
) -> New:
    """softmax(q kᵀ · scale + added) v."""
    batch, kv, m, _ = q.shape
    slots = keys.shape[2]
    if softcap is None and (batch * kv <= FEW_HEADS or slots >= LONG):
        if added is not None and added.shape[1] > 1:
            added = added.view(-1, kv, m, slots)
        return F.scaled_dot_product_attention(q, keys, values, added, 0.0, False, scale=scale)
    scores = _capped((q * scale) @ keys.transpose(-1, -2), softcap)
    if added is not None:
        scores = scores + (added.view(-1, kv, m, slots) if added.shape[1] > 1 else added)
    return scores.softmax(-1) @ values


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def _fold(q: Float[Tensor, "rows kv group n"], outputs: int) -> Float[Tensor, "samples kv queries n"]:
    """The rows of a sample beside each other on the query axis."""
    if outputs == 1:
        return q
    rows, kv, group, n = q.shape
    return q.view(-1, outputs, kv, group, n).transpose(1, 2).reshape(rows // outputs, kv, outputs * group, n)


def _unfold(x: Float[Tensor, "samples kv queries n"], outputs: int) -> Float[Tensor, "rows kv group n"]:
    """`_fold` undone."""
    if outputs == 1:
        return x
    samples, kv, queries, n = x.shape
    parts = x.view(samples, kv, outputs, queries // outputs, n).transpose(1, 2)
    return parts.reshape(samples * outputs, kv, queries // outputs, n)
