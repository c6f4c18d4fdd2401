"""A router and its experts: each token is processed by k of E feed-forward networks."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from isoform import config
from isoform.nn.activations import activation
from isoform.nn.capture import tap
from isoform.nn.dropout import dropout
from isoform.nn.linear import Linear


class Router(nn.Module):
    """Which experts a token goes to, and with which weights."""

    def __init__(self, cfg: config.Experts, d_model: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.scores = Linear(d_model, cfg.n_experts, bias=cfg.router_bias)
        self._routed: tuple[Tensor, Tensor] | None = None  # of the last pass while training

    def forward(
        self, x: Float[Tensor, "tokens d_model"]
    ) -> tuple[Float[Tensor, "tokens k"], Int[Tensor, "tokens k"]]:
        """Weights and indices of the chosen experts."""
        cfg = self.cfg
        scores = tap(self, "router", self.scores(x))
        wide = scores.double() if scores.dtype == torch.float64 else scores.float()
        if cfg.router_order == "top_k_then_softmax":
            top, chosen = wide.topk(cfg.top_k, -1)
            weights = top.softmax(-1)
        else:
            shares = wide.sigmoid() if cfg.router_order.startswith("sigmoid") else wide.softmax(-1)
            weights, chosen = shares.topk(cfg.top_k, -1)
            if cfg.router_order.endswith("renormalised"):
                weights = weights / weights.sum(-1, keepdim=True)
        self._routed = (wide, chosen) if cfg.load_balance and self.training else None
        return (weights * cfg.router_scale).to(x.dtype), chosen

    def balance(self, real: Bool[Tensor, "batch length"] | None) -> Float[Tensor, ""] | None:
        """coefficient · E · Σ share of tokens · mean probability of the last pass (Fedus et al. 2021, eq. 4).

        What it is made of is let go, so that it can be asked for once a pass.

        Args:
            real: True where a token is real: padding is no token. None: all are.

        Returns:
            None after a pass that was not for training, and where the coefficient is 0.
        """
        if self._routed is None:
            return None
        (scores, chosen), self._routed = self._routed, None
        shares = scores.softmax(-1)
        went = F.one_hot(chosen, self.cfg.n_experts).to(scores.dtype).sum(1) / self.cfg.top_k
        if real is None:
            mean_went, mean_share = went.mean(0), shares.mean(0)
        else:
            weight = real.flatten().to(scores.dtype)
            weight = weight / weight.sum()
            mean_went, mean_share = weight @ went, weight @ shares
        return self.cfg.load_balance * self.cfg.n_experts * (mean_went * mean_share).sum()


class Experts(nn.Module):
    """Σ over the chosen experts of weight · expert(x). All experts' weights are stacked on a leading axis."""

    def __init__(self, cfg: config.Experts, d_model: int) -> None:
        super().__init__()
        self.cfg = cfg
        expert = cfg.expert
        self.gated = isinstance(expert, config.Gated)
        self.activation = activation(expert.activation)
        self.router = Router(cfg, d_model)
        e, f = cfg.n_experts, expert.width
        rows = 2 * f if self.gated else f
        self.up = nn.Parameter(torch.empty(e, rows, d_model))
        self.down = nn.Parameter(torch.empty(e, d_model, f))
        if isinstance(expert, config.Gated):
            self.gate_bias = nn.Parameter(torch.zeros(e, f)) if expert.bias_gate else None
        else:
            self.gate_bias = None
        self.up_bias = nn.Parameter(torch.zeros(e, f)) if expert.bias_up else None
        self.down_bias = nn.Parameter(torch.zeros(e, d_model)) if expert.bias_down else None

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Route every token."""
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(flat)
        # Only tensors of fixed shape can be traced, or run without data: there every expert runs on every
        # token, unchosen ones weigh zero. Else each expert sees its own tokens. The function is the same.
        out = (
            self._all(flat, weights, chosen)
            if torch.compiler.is_compiling() or x.is_meta
            else self._own(flat, weights, chosen)
        )
        return out.view_as(x)

    def _own(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.cfg.n_experts).tolist()
        rows = order // self.cfg.top_k
        share = weights.flatten()[order]
        out = torch.zeros_like(x)
        start = 0
        for e, n in enumerate(counts):
            if n:
                mine = rows[start : start + n]
                out = out.index_add(0, mine, self._expert(x[mine], e) * share[start : start + n, None])
                start += n
        return out

    def _all(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        share = torch.zeros(x.shape[0], self.cfg.n_experts, dtype=x.dtype, device=x.device)
        share = share.scatter(1, chosen, weights)
        outs = [self._expert(x, e) * share[:, e, None] for e in range(self.cfg.n_experts)]
        return torch.stack(outs).sum(0)

    def _expert(self, x: Tensor, e: int) -> Tensor:
        f = self.cfg.expert.width
        up = F.linear(x, self.up[e])
        if self.gated:
            gate, content = up[..., :f], up[..., f:]
            gate = gate if self.gate_bias is None else gate + self.gate_bias[e]
            content = content if self.up_bias is None else content + self.up_bias[e]
            hidden = self.activation(gate) * content
        else:
            hidden = self.activation(up if self.up_bias is None else up + self.up_bias[e])
        hidden = dropout(hidden, self.cfg.expert.dropout, self.training)
        return F.linear(hidden, self.down[e], None if self.down_bias is None else self.down_bias[e])
