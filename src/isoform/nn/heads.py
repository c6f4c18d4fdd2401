"""What comes after the last hidden state: scores over tokens or labels, or one vector a sequence."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from isoform import config
from isoform.nn.activations import activation
from isoform.nn.capture import tap
from isoform.nn.dropout import dropout
from isoform.nn.linear import Linear
from isoform.nn.norms import norm
from isoform.nn.products import Product


class Transform(nn.Module):
    """norm(activation(x W + b)), to the width of the output table."""

    def __init__(self, cfg: config.Transform, d_model: int, width: int) -> None:
        super().__init__()
        self.dense = Linear(d_model, width, bias=cfg.bias)
        self.activation = activation(cfg.activation)
        self.norm = norm(cfg.norm, width)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch width"]:
        """Map each state."""
        return self.norm(self.activation(self.dense(x)))


class TokenHead(nn.Module):
    """Scores over the vocabulary. A tied head holds the embedding's own parameter (6.36)."""

    product: Product | None = None

    def __init__(
        self, cfg: config.TokenHead, d_model: int, embedding: config.Embedding, table: nn.Parameter
    ) -> None:
        super().__init__()
        self.cfg = cfg
        width = embedding.width if cfg.tied or cfg.transform is not None else d_model
        self.transform = nn.Identity() if cfg.transform is None else Transform(cfg.transform, d_model, width)
        self.scale = d_model**-0.5 if cfg.scale == "inverse_sqrt_d_model" else float(cfg.scale)
        self.weight = table if cfg.tied else nn.Parameter(torch.empty(embedding.vocab_size, width))
        self.bias = nn.Parameter(torch.zeros(embedding.vocab_size)) if cfg.bias else None

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch vocab"]:
        """Unnormalised scores."""
        x = tap(self, "input", self.transform(x))
        if self.scale != 1.0:
            x = x * self.scale
        scores = F.linear(x, self.weight, self.bias) if self.product is None else self.product(x)
        if self.cfg.softcap is not None:
            scores = torch.tanh(scores / self.cfg.softcap) * self.cfg.softcap
        return tap(self, "logits", scores)


class Dense(nn.Module):
    """activation(x W + b), d_model to d_model."""

    def __init__(self, cfg: config.Pooler, d_model: int) -> None:
        super().__init__()
        self.dense = Linear(d_model, d_model, bias=cfg.bias)
        self.activation = activation(cfg.activation)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Map each state."""
        return self.activation(self.dense(x))


def pool(
    hidden: Float[Tensor, "batch length d_model"], real: Bool[Tensor, "batch length"] | None, pooling: str
) -> Float[Tensor, "batch d_model"]:
    """One state a row, over real tokens only, on whichever side the padding is. An empty row gives zeros."""
    if real is None:
        if pooling == "mean":
            return hidden.mean(1)
        return hidden[:, 0] if pooling == "first" else hidden[:, -1]
    if pooling == "mean":
        kept = hidden.masked_fill(~real[..., None], 0.0)
        return kept.sum(1) / real.sum(1, keepdim=True).clamp(min=1).to(hidden.dtype)
    flags = real.to(torch.uint8)
    place = flags.argmax(-1) if pooling == "first" else real.shape[-1] - 1 - flags.flip(-1).argmax(-1)
    rows = torch.arange(hidden.shape[0], device=hidden.device)
    return hidden[rows, place].masked_fill(~real.any(-1, keepdim=True), 0.0)


class SequenceHead(nn.Module):
    """Pool, an optional dense layer, dropout, scores over the labels."""

    def __init__(self, cfg: config.SequenceHead, d_model: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.pooler = nn.Identity() if cfg.pooler is None else Dense(cfg.pooler, d_model)
        self.labels = Linear(d_model, cfg.n_labels, bias=cfg.bias)

    def forward(
        self, hidden: Float[Tensor, "batch length d_model"], real: Bool[Tensor, "batch length"] | None
    ) -> tuple[Float[Tensor, "batch d_model"], Float[Tensor, "batch labels"]]:
        """The pooled state and the scores."""
        pooled = dropout(pool(hidden, real, self.cfg.pooling), self.cfg.input_dropout, self.training)
        pooled = tap(self, "pooled", self.pooler(pooled))
        return pooled, tap(self, "logits", self.labels(dropout(pooled, self.cfg.dropout, self.training)))


class TaggingHead(nn.Module):
    """Scores over the labels at every token."""

    def __init__(self, cfg: config.TaggingHead, d_model: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.dense = nn.Identity() if cfg.dense is None else Dense(cfg.dense, d_model)
        self.labels = Linear(d_model, cfg.n_labels, bias=cfg.bias)

    def forward(self, hidden: Float[Tensor, "batch length d_model"]) -> Float[Tensor, "batch length labels"]:
        """The scores."""
        x = dropout(self.dense(hidden), self.cfg.dropout, self.training)
        return tap(self, "logits", self.labels(x))


class PoolingHead(nn.Module):
    """One vector a sequence."""

    def __init__(self, cfg: config.PoolingHead, d_model: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.pooler = nn.Identity() if cfg.pooler is None else Dense(cfg.pooler, d_model)

    def forward(
        self, hidden: Float[Tensor, "batch length d_model"], real: Bool[Tensor, "batch length"] | None
    ) -> Float[Tensor, "batch d_model"]:
        """The vector, of unit length where the configuration says so."""
        pooled = self.pooler(pool(hidden, real, self.cfg.pooling))
        return tap(self, "pooled", F.normalize(pooled, dim=-1) if self.cfg.normalise else pooled)
