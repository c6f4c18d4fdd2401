"""From token ids to the first hidden state."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from isoform import config
from isoform.errors import ShapeError
from isoform.nn.capture import tap
from isoform.nn.dropout import dropout
from isoform.nn.linear import Linear, lookup
from isoform.nn.norms import norm
from isoform.nn.positions import Learned, Sinusoidal
from isoform.tokens import Tokens


class Embedding(nn.Module):
    """lookup × scale → [projection] + positions + token types → norm → dropout → [projection]."""

    def __init__(self, cfg: config.Embedding, d_model: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.scale = d_model**0.5 if cfg.scale == "sqrt_d_model" else float(cfg.scale)
        self.weight = nn.Parameter(torch.empty(cfg.vocab_size, cfg.width))
        early = cfg.projection is not None and cfg.projection.place == "before_positions"
        width = d_model if early else cfg.width
        positions = cfg.positions
        self.positions = (
            Learned(positions, width)
            if isinstance(positions, config.Learned)
            else Sinusoidal(positions, width)
            if isinstance(positions, config.Sinusoidal)
            else None
        )
        self.token_types = nn.Parameter(torch.empty(cfg.n_token_types, width)) if cfg.n_token_types else None
        self.norm = norm(cfg.norm, width)
        project = cfg.projection
        self.projection = nn.Identity() if project is None else Linear(cfg.width, d_model, bias=project.bias)
        self.early = early

    def forward(
        self, tokens: Tokens, positions: Int[Tensor, "rows length"]
    ) -> Float[Tensor, "batch length d_model"]:
        """The first hidden state. Ids at padded places are not looked up: row 0 stands in for them."""
        ids = tokens.ids if tokens.real is None else tokens.ids.masked_fill(~tokens.real, 0)
        x = lookup(ids, self.weight, "token id")
        if self.scale != 1.0:
            # The factor in the table's own dtype, as implementations that run in half precision have it.
            x = x * torch.tensor(self.scale, dtype=x.dtype, device=x.device)
        x = tap(self, "tokens", x)
        if self.early:
            x = self.projection(x)
        if self.positions is not None:
            x = x + tap(self, "position", self.positions(positions, x.dtype))
        if self.token_types is not None:
            x = x + self._types(tokens)
        elif tokens.token_types is not None:
            raise ShapeError("Tokens.token_types is given, but the embedding has no token types")
        x = dropout(self.norm(tap(self, "sum", x)), self.cfg.dropout, self.training)
        return tap(self, "output", x if self.early else self.projection(x))

    def _types(self, tokens: Tokens) -> Tensor:
        assert self.token_types is not None
        if tokens.token_types is None:
            return self.token_types[0]
        types = tokens.token_types
        types = types if tokens.real is None else types.masked_fill(~tokens.real, 0)
        return lookup(types, self.token_types, "token type")

    def extra_repr(self) -> str:
        cfg = self.cfg
        return f"{cfg.vocab_size} × {cfg.width}, scale={self.scale:g}, vocabulary={cfg.vocabulary!r}"
