"""A small pre-norm decoder written in two styles, for what is told about code and not about functions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IDS = torch.arange(1, 25).reshape(3, 8) * 5 % 31


def drawn(module: nn.Module, seed: int = 0) -> nn.Module:
    """Uniform weights, biases and gains included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            spread = torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 0.5
            parameter.copy_(spread + (parameter.dim() == 1 and "norm" in type(module).__name__))
    return module.eval()


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (3, 4)).transpose(1, 2)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(12, 12) for _ in range(4))
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12)
        self.first, self.second = nn.LayerNorm(12), nn.LayerNorm(12)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = F.scaled_dot_product_attention(
            heads(self.q(y)), heads(self.k(y)), heads(self.v(y)), is_causal=True
        )
        x = x + self.o(z.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Plain(nn.Module):
    """One module a step. ``times`` runs the layers again with the same weights."""

    def __init__(self, layers: int = 2, vocabulary: int = 31, times: int = 1) -> None:
        super().__init__()
        self.table = nn.Embedding(31, 12)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, vocabulary)
        self.times = times

    def states(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for _ in range(self.times):
            for layer in self.layers:
                x = layer(x)
        return self.norm(x)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.states(ids))


class Other(nn.Module):
    """The same function of a `Plain`'s weights: packed, transposed, permuted, time first, in place."""

    def __init__(self, like: Plain, *, time_first: bool = False, form: str = "tensor") -> None:
        super().__init__()
        self.time_first, self.form = time_first, form
        self.embed = nn.Parameter(like.table.weight.detach().clone())
        self.wrapped = nn.Sequential(nn.Identity(), nn.Dropout(0.1))
        parts: list[Tensor] = []
        order = torch.arange(20).flip(0)  # units of the feed-forward network in another order
        for layer in [*like.layers] * like.times:
            parts += [
                torch.cat([m.weight.t() for m in (layer.q, layer.k, layer.v)], 1),
                torch.cat([m.bias for m in (layer.q, layer.k, layer.v)]),
                layer.o.weight.t().contiguous(), layer.o.bias,
                layer.up.weight[order], layer.up.bias[order],
                layer.down.weight[:, order], layer.down.bias,
                layer.first.weight - 1, layer.first.bias, layer.second.weight - 1, layer.second.bias,
            ]  # fmt: skip
        self.parts = nn.ParameterList([nn.Parameter(p.detach().clone()) for p in parts])
        self.last, self.shift = nn.Parameter(like.norm.weight - 1), nn.Parameter(like.norm.bias.clone())
        self.head, self.bias = (nn.Parameter(p.detach().clone()) for p in (like.head.weight, like.head.bias))

    def norm(self, x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
        y = x - x.mean(-1, keepdim=True)
        return y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (1 + gain) + bias

    def forward(self, ids: Tensor):
        x = self.embed[ids]
        states = []
        for at in range(0, len(self.parts), 12):
            qkv, qkv_b, o, o_b, up, up_b, down, down_b, g1, h1, g2, h2 = self.parts[at : at + 12]
            q, k, v = (heads(p) for p in (self.norm(x, g1, h1) @ qkv + qkv_b).chunk(3, -1))
            scores = (q * 0.5) @ k.transpose(-1, -2)
            scores.masked_fill_(torch.ones(ids.shape[1], ids.shape[1]).triu(1).bool(), float("-inf"))
            context = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
            x = x + (context @ o + o_b)
            y = F.gelu(self.norm(x, g2, h2) @ up.t() + up_b)
            x = x + self.wrapped(y @ down.t() + down_b)
            states.append(x)
        states.append(self.norm(x, self.last, self.shift))
        logits = states[-1] @ self.head.t() + self.bias
        logits = logits.transpose(0, 1) if self.time_first else logits
        if self.form == "tuple":
            return logits, tuple(states)
        return {"hidden_states": states, "logits": logits} if self.form == "dict" else logits


def pair(**options) -> tuple[nn.Module, nn.Module]:
    """Both styles with the same weights, in float64."""
    like = Plain(times=options.pop("times", 1)).double()
    drawn(like)
    return like, Other(like, **options).double().eval()
