"""Position-wise networks: two-layer (6.3) and gated (6.9)."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from isoform import config
from isoform.nn.activations import activation
from isoform.nn.capture import tap
from isoform.nn.dropout import dropout
from isoform.nn.linear import Linear, Packed


class TwoLayer(nn.Module):
    """φ(x W1 + b1) W2 + b2 (6.3); with the identity for φ the two maps are one (6.4, R7)."""

    def __init__(self, cfg: config.TwoLayer, d_model: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.activation = activation(cfg.activation)
        self.up = Linear(d_model, cfg.width, bias=cfg.bias_up)
        self.down = Linear(cfg.width, d_model, bias=cfg.bias_down)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The same map at every position."""
        hidden = self.activation(tap(self, "preactivation", self.up(x)))
        hidden = dropout(tap(self, "hidden", hidden), self.cfg.dropout, self.training)
        return self.down(hidden)


class Gated(nn.Module):
    """[g(x Wg) ∘ (x Wu)] Wd. The branches are separate parameters that share one matrix product (R9)."""

    def __init__(self, cfg: config.Gated, d_model: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.activation = activation(cfg.activation)
        self.gate_up = Packed(
            d_model, {"gate": cfg.width, "up": cfg.width}, {"gate": cfg.bias_gate, "up": cfg.bias_up}
        )
        self.down = Linear(cfg.width, d_model, bias=cfg.bias_down)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The same map at every position."""
        gate, up = self.gate_up.project(x)
        hidden = self.activation(tap(self, "gate", gate)) * tap(self, "content", up)
        hidden = dropout(tap(self, "hidden", hidden), self.cfg.dropout, self.training)
        return self.down(hidden)


def feed_forward(cfg: config.FeedForward, d_model: int) -> nn.Module:
    """The module of a feed-forward configuration."""
    if isinstance(cfg, config.TwoLayer):
        return TwoLayer(cfg, d_model)
    if isinstance(cfg, config.Gated):
        return Gated(cfg, d_model)
    from isoform.nn.experts import Experts

    return Experts(cfg, d_model)
