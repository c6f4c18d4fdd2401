"""LayerNorm (6.13–6.14, R12) and RMSNorm (6.18, R13) over the feature axis alone, never batch or time."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from isoform import config
from isoform.nn.linear import refuse_width


class Norm(nn.Module):
    """γ ∘ (x - μ)/√(σ² + ε) + β, or γ ∘ x/√(mean x² + ε); γ is the weight plus the configured offset.

    The variance is the population's (divided by d) and ε stands inside the root.
    """

    def __init__(self, cfg: config.Norm, width: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.width = width
        self.weight = nn.Parameter(torch.full((width,), 1.0 - cfg.gain_offset)) if cfg.gain else None
        self.bias = nn.Parameter(torch.zeros(width)) if cfg.bias else None

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """Normalise the last axis.

        Raises:
            ShapeError: the input has another width (R1).
        """
        if x.shape[-1] != self.width:
            refuse_width(x, self.width, f"a norm of shape [{self.width}]")
        cfg, gain = self.cfg, self.weight
        if gain is not None and cfg.gain_offset:
            gain = gain + cfg.gain_offset
        if cfg.kind == "layer":
            return F.layer_norm(x, (self.width,), gain, self.bias, cfg.eps)
        if x.dtype in (torch.float32, torch.float64):
            return F.rms_norm(x, (self.width,), gain, cfg.eps)
        return self._half_rms(x, gain)

    def _half_rms(self, x: Tensor, gain: Tensor | None) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.cfg.eps)
        if gain is None:
            return wide.to(x.dtype)
        if self.cfg.gain_after_cast:
            assert self.weight is not None
            return (wide * (self.weight.float() + self.cfg.gain_offset)).to(x.dtype)
        return wide.to(x.dtype) * gain

    def extra_repr(self) -> str:
        cfg = self.cfg
        offset = f", gain_offset={cfg.gain_offset:g}" if cfg.gain_offset else ""
        return f"{cfg.kind}, {self.width}, eps={cfg.eps:g}, gain={cfg.gain}, bias={cfg.bias}{offset}"


def norm(cfg: config.Norm | None, width: int) -> nn.Module:
    """The norm, or the identity where there is none."""
    return nn.Identity() if cfg is None else Norm(cfg, width)
