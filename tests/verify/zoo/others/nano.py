"""A small GPT as one finds it in a single file: ``c_attn``, ``c_proj``, a tied head, learned positions."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, VOCABULARY = 32, 4, 41


class LayerNorm(nn.Module):
    def __init__(self, faults: frozenset[str]) -> None:
        super().__init__()
        self.faults = faults
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if not self.faults.isdisjoint(("norm-kind", "norm-kind-bare")):
            y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight
            return y + self.bias if "norm-kind" in self.faults else y
        eps = 1e-2 if "norm-eps" in self.faults else 1e-5
        return F.layer_norm(x, (WIDTH,), self.weight, self.bias, eps)


class CausalSelfAttention(nn.Module):
    def __init__(self, faults: frozenset[str]) -> None:
        super().__init__()
        self.faults = faults
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("bias", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        if "qkv-packing" in self.faults:
            q, k, v = self.c_attn(x).view(b, t, HEADS, 3 * (c // HEADS)).transpose(1, 2).chunk(3, -1)
        else:
            q, k, v = self.c_attn(x).split(c, dim=2)
            q, k, v = (z.view(b, t, HEADS, c // HEADS).transpose(1, 2) for z in (q, k, v))
        if "value-scale" in self.faults:
            v = 1.1 * v
        width = c if "attention-scale" in self.faults else k.size(-1)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(width))
        if "softcap" in self.faults:
            att = 5.0 * torch.tanh(att / 5.0)
        if "causality" not in self.faults:
            att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        if "temperature" in self.faults:  # grows with the place: in no list
            att = att * torch.arange(1, t + 1).log1p().to(att.dtype)[:, None]
        if "softmax-axis" in self.faults:
            att = F.softmax(att, dim=1)
        else:
            att = F.softmax(att, dim=-1)
        if "talking-heads" in self.faults:
            att = att + 0.2 * att.roll(1, 1)
        y = att @ v
        y = y.view(b, t, c) if "head-merge" in self.faults else y.transpose(1, 2).contiguous().view(b, t, c)
        if "weight-transpose" in self.faults:
            return y @ self.c_proj.weight + self.c_proj.bias
        return self.c_proj(y)


class MLP(nn.Module):
    def __init__(self, faults: frozenset[str]) -> None:
        super().__init__()
        self.faults = faults
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_fc(x)
        if "activation" in self.faults:
            x = F.gelu(x)
        elif "activation-own" in self.faults:
            x = torch.sin(x) * x
        else:
            x = 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
        if "bias-missing" in self.faults:
            return F.linear(x, self.c_proj.weight)
        return self.c_proj(x)


class Block(nn.Module):
    def __init__(self, faults: frozenset[str]) -> None:
        super().__init__()
        self.faults = faults
        self.ln_1, self.attn = LayerNorm(faults), CausalSelfAttention(faults)
        self.ln_2, self.mlp = LayerNorm(faults), MLP(faults)

    def forward(self, x: Tensor) -> Tensor:
        if "norm-placement" in self.faults:
            x = self.ln_1(x + self.attn(x))
            return self.ln_2(x + self.mlp(x))
        if "parallel-residual" in self.faults:
            return x + self.attn(self.ln_1(x)) + self.mlp(self.ln_2(x))
        if "order" in self.faults:
            x = x + self.mlp(self.ln_2(x))
            return x + self.attn(self.ln_1(x))
        x = x + self.attn(self.ln_1(x)) * (0.5 if "residual-scale" in self.faults else 1.0)
        if "norm-instance" in self.faults:
            return x + self.mlp(self.ln_1(x))
        if "skip-missing" in self.faults:
            return self.mlp(self.ln_2(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """``idx`` → logits; ``at`` names the layer of the faults that belong to one, None: all."""

    def __init__(self, *faults: str, at: int | None = None, layers: int = 3) -> None:
        super().__init__()
        self.faults = frozenset(faults)
        none: frozenset[str] = frozenset()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(64, WIDTH),
                "h": nn.ModuleList(Block(self.faults if at in (None, i) else none) for i in range(layers)),
                "ln_f": LayerNorm(self.faults if at is None else none),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, idx: Tensor) -> Tensor:
        t, faults = idx.size(1), self.faults
        pos = torch.arange(0, t) + (2 if "position-offset" in faults else 0)
        tok = self.transformer.wte(idx)
        x = tok * math.sqrt(WIDTH) if "embedding-scale" in faults else tok
        x = x + self.transformer.wpe(pos)
        blocks = list(self.transformer.h)
        if "layer-order" in faults:
            blocks[0], blocks[1] = blocks[1], blocks[0]
        if "layer-twice" in faults:
            blocks = [blocks[0], *blocks]
        for number, block in enumerate(blocks):
            x = block(x)
            if "skip" in faults and number == 1:
                x = x + tok
        if "norm-missing" not in faults:
            x = self.transformer.ln_f(x)
        logits = self.lm_head(x)
        return 4.0 * torch.tanh(logits / 4.0) if "logit-cap" in faults else logits
