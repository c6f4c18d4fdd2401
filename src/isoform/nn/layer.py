"""Sublayers on the residual stream, and the layers they make (6.20–6.31)."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from isoform import config
from isoform.nn.attention import Attention
from isoform.nn.cache import LayerCache
from isoform.nn.capture import tap
from isoform.nn.dropout import dropout
from isoform.nn.feed_forward import feed_forward
from isoform.nn.kernels import Heads
from isoform.nn.norms import norm
from isoform.nn.reading import Reading

Stream = Float[Tensor, "batch length d_model"]


class Residual(nn.Module):
    """x ↦ after_sum(x + α · dropout(after_body(body(before(x))))).

    Each slot holds a norm or the identity; which ones are filled is the placement: post fills ``after_sum``
    (6.20), pre ``before`` (6.21), sandwich ``before`` and ``after_body``, res_post ``after_body``.
    """

    def __init__(self, cfg: config.Layer, d_model: int, body: nn.Module) -> None:
        super().__init__()
        place = cfg.placement
        self.before = norm(cfg.norm if place in ("pre", "sandwich") else None, d_model)
        self.body = body
        self.after_body = norm(cfg.norm if place in ("sandwich", "res_post") else None, d_model)
        self.after_sum = norm(cfg.norm if place == "post" else None, d_model)
        # Empty slots are not called: in a step of one token a call costs as much as a small product.
        self._pre, self._mid, self._post = (
            place in ("pre", "sandwich"),
            place in ("sandwich", "res_post"),
            place == "post",
        )
        self.scale = cfg.residual_scale
        self.from_normalised = cfg.residual_source == "normalised"
        self.dropout = cfg.increment_dropout("attention" if isinstance(body, Attention) else "feed_forward")

    def forward(self, x: Stream, *context: object) -> Stream:
        """One residual update; ``context`` goes to the body."""
        inner = tap(self, "normalised", self.before(x) if self._pre else x)
        increment = self.body(inner, *context)
        increment = tap(self, "increment", self.after_body(increment) if self._mid else increment)
        total = self._add(inner if self.from_normalised else x, increment)
        return tap(self, "output", self.after_sum(total) if self._post else total)

    def _add(self, x: Stream, increment: Stream) -> Stream:
        increment = dropout(increment, self.dropout, self.training)
        if self.scale != 1.0:
            increment = increment * self.scale
        return tap(self, "sum", x + increment)


class Layer(nn.Module):
    """Attention, in a decoder with a source cross-attention, then the feed-forward network, in sequence."""

    def __init__(self, cfg: config.Layer, d_model: int) -> None:
        super().__init__()
        self.attention = Residual(cfg, d_model, Attention(cfg.attention, d_model, cross=False))
        self.memory_norm = norm(cfg.memory_norm, d_model)
        self.cross_attention = (
            None
            if cfg.cross_attention is None
            else Residual(cfg, d_model, Attention(cfg.cross_attention, d_model, cross=True))
        )
        self.feed_forward = Residual(cfg, d_model, feed_forward(cfg.feed_forward, d_model))

    def forward(
        self,
        x: Stream,
        reading: Reading,
        cross: Reading | None = None,
        memory: Float[Tensor, "batch source d_model"] | tuple[Heads, Heads] | None = None,
        cache: LayerCache | None = None,
    ) -> Stream:
        """``[B, T, d]`` to ``[B, T, d]``."""
        x = self.attention(x, reading, None, cache)
        if self.cross_attention is not None:
            if isinstance(memory, Tensor):
                memory = self.memory_norm(memory)
            x = self.cross_attention(x, cross, memory)
        return self.feed_forward(x)

    def project_memory(self, memory: Float[Tensor, "batch source d_model"]) -> tuple[Heads, Heads]:
        """The cross-attention's keys and values of a source, once for all steps."""
        assert self.cross_attention is not None
        attention = self.cross_attention.body
        assert isinstance(attention, Attention)
        return attention.project_memory(self.memory_norm(memory))


class ParallelLayer(nn.Module):
    """x + α A(N₁ x) + α F(N₂ x); with one shared norm N₁ = N₂ (GPT-J, GPT-NeoX, Falcon, Phi)."""

    def __init__(self, cfg: config.Layer, d_model: int) -> None:
        super().__init__()
        self.attention_norm = norm(cfg.norm, d_model)
        self.feed_forward_norm = norm(cfg.norm if cfg.residual == "parallel" else None, d_model)
        self.attention = Attention(cfg.attention, d_model, cross=False)
        self.feed_forward = feed_forward(cfg.feed_forward, d_model)
        self.shared = cfg.residual == "parallel_shared_norm"
        self.scale = cfg.residual_scale
        self.dropouts = (cfg.increment_dropout("attention"), cfg.increment_dropout("feed_forward"))

    def forward(
        self,
        x: Stream,
        reading: Reading,
        cross: Reading | None = None,
        memory: Float[Tensor, "batch source d_model"] | tuple[Heads, Heads] | None = None,
        cache: LayerCache | None = None,
    ) -> Stream:
        """``[B, T, d]`` to ``[B, T, d]``."""
        inner = tap(self, "normalised", self.attention_norm(x))
        read = dropout(self.attention(inner, reading, None, cache), self.dropouts[0], self.training)
        if not self.shared:
            inner = self.feed_forward_norm(x)
        mixed = dropout(self.feed_forward(inner), self.dropouts[1], self.training)
        increment = tap(self, "increment", read + mixed)
        return tap(self, "output", x + (increment if self.scale == 1.0 else increment * self.scale))


def layer(cfg: config.Layer, d_model: int) -> Layer | ParallelLayer:
    """The layer of a configuration."""
    return Layer(cfg, d_model) if cfg.residual == "sequential" else ParallelLayer(cfg, d_model)
