"""Decoder, encoder and encoder–decoder with one module a step; ``fault`` names what is planted, and where."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Faults = dict[str, object]


class Norm(nn.Module):
    def __init__(self, d: int, kind: str, eps: float, fault: Faults) -> None:
        super().__init__()
        self.kind, self.eps, self.fault = kind, eps, fault
        self.weight = nn.Parameter(torch.ones(d))
        if kind == "layer":
            self.bias = nn.Parameter(torch.zeros(d))

    def forward(self, x: Tensor) -> Tensor:
        gain = self.weight + 1 if "norm-offset" in self.fault else self.weight
        eps = 1e-3 if "norm-eps" in self.fault else self.eps
        if self.kind == "rms" or "norm-kind" in self.fault:
            y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * gain
            return y + self.bias if self.kind == "layer" else y
        var = x.var(-1, keepdim=True, unbiased="norm-unbiased" in self.fault)
        root = var.sqrt() + eps if "norm-outside" in self.fault else (var + eps).sqrt()
        return (x - x.mean(-1, keepdim=True)) / root * gain + self.bias


def rotate(x: Tensor, positions: Tensor, fault: Faults, theta: float, width: int) -> Tensor:
    """Half-split rotation of ``[B, h, T, dh]``."""
    if "rope-frequency" in fault:
        theta = 500.0
    if "rope-scaling" in fault:
        positions = positions / 4
    if "rope-partial" in fault:
        width = width // 2
    x, rest = x[..., :width], x[..., width:]
    freq = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    if "rope-axis" in fault:
        positions = torch.arange(x.shape[1])[None].expand(x.shape[0], -1)
        angle = positions[:, :, None, None] * freq
    else:
        angle = positions[:, None, :, None] * freq
    if "rope-precision" in fault:
        angle = angle.to(torch.bfloat16)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    if "rope-pairing" in fault:
        a, b = x[..., 0::2], x[..., 1::2]
        out = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = x.chunk(2, -1)
        out = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return torch.cat([out, rest], -1)


class Attention(nn.Module):
    def __init__(self, c: Config, fault: Faults, causal: bool, cross: bool, layer: int) -> None:
        super().__init__()
        self.c, self.fault, self.causal, self.cross, self.layer = c, fault, causal, cross, layer
        self.width = c.d // c.heads
        bias = c.bias
        self.q_proj = nn.Linear(c.d, c.d, bias=bias)
        self.k_proj = nn.Linear(c.d, c.kv * self.width, bias=bias)
        self.v_proj = nn.Linear(c.d, c.kv * self.width, bias=bias and "bias-missing" not in fault)
        self.o_proj = nn.Linear(c.d, c.d, bias=bias)
        if c.qk_norm:
            self.q_norm = Norm(self.width, "rms", 1e-6, {})
            self.k_norm = Norm(self.width, "rms", 1e-6, {})

    def forward(
        self, x: Tensor, memory: Tensor, real: Tensor, positions: Tensor, bias: Tensor | None
    ) -> Tensor:
        c, fault, b, t, s = self.c, self.fault, x.shape[0], x.shape[1], memory.shape[1]
        q, k, v = self.q_proj(x), self.k_proj(memory), self.v_proj(memory)
        if "qkv-packing" in fault and not self.cross:  # thirds of each head, as if they lay together
            q, k, v = torch.cat([q, k, v], -1).unflatten(-1, (c.heads, 3, -1)).unbind(3)
        q = q.reshape(b, t, c.heads, -1).transpose(1, 2)
        k = k.reshape(b, s, c.kv, -1).transpose(1, 2)
        v = v.reshape(b, s, c.kv, -1).transpose(1, 2)
        late = "qk-norm-order" in fault
        if c.qk_norm and "qk-norm-axis" in fault:  # over all heads together
            q, k = (
                F.rms_norm(z.transpose(1, 2).flatten(2), (z.shape[1] * self.width,), None, 1e-6)
                .unflatten(-1, (-1, self.width))
                .transpose(1, 2)
                * norm.weight
                for z, norm in ((q, self.q_norm), (k, self.k_norm))
            )
        elif c.qk_norm and "qk-norm" not in fault and not late:
            q, k = self.q_norm(q), self.k_norm(k)
        if c.position == "rope" and not self.cross:
            q = rotate(q, positions, fault, c.theta, c.rotary)
            k = rotate(k, positions, fault, c.theta, c.rotary)
        if c.qk_norm and late:
            q, k = self.q_norm(q), self.k_norm(k)
        groups = c.heads // c.kv
        if "kv-head-order" in fault:
            k, v = k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1)
        else:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scale = c.d**-0.5 if "attention-scale" in fault else c.scale
        if isinstance(fault.get("attention-scale"), float):
            scale = float(fault["attention-scale"])
        scores = q @ k.transpose(-1, -2) * scale
        if c.cap is not None and "softcap" not in fault:
            scores = c.cap * torch.tanh(scores / c.cap)
        if bias is not None and not ("relative-bias" in fault and self.layer > 0):
            scores = scores + bias
        allowed = torch.ones(t, s, dtype=torch.bool)
        if self.causal and "causality" not in fault:
            allowed = allowed.tril(1 if "causality-off" in fault else 0)
        if c.window is not None and "sliding-window-lost" not in fault and not self.cross:
            reach = c.window + ("sliding-window" in fault)
            far = torch.arange(t)[:, None] - torch.arange(s)[None]
            allowed = allowed & (far < reach)
            if "sliding-window-both" in fault:
                allowed = (far.abs() < c.window).expand_as(allowed)
        allowed = allowed.expand(b, 1, t, s)
        polarity = "" if self.cross else fault.get("mask-polarity", "")
        if "mask-row" in fault and not self.cross:
            real = real.roll(1, 0)
        if not (polarity or (self.cross and "cross-mask" in fault)):
            allowed = allowed & real[:, None, None]
        elif polarity == "inverted":
            allowed = allowed & ~real[:, None, None]
        if polarity == "added":
            scores = scores + real[:, None, None].to(scores.dtype)
        weights = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1)
        if "unlisted-attention" in fault:
            weights = weights.square()
        mixed = weights @ v
        mixed = mixed if "head-merge" in fault else mixed.transpose(1, 2)
        mixed = mixed.reshape(b, t, c.d)
        if "weight-transpose" in fault:
            return F.linear(mixed, self.o_proj.weight.t(), self.o_proj.bias)
        return self.o_proj(mixed)


ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick-gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "relu2": lambda x: F.relu(x) ** 2,
    "softsign": F.softsign,
}


class FeedForward(nn.Module):
    def __init__(self, c: Config, fault: Faults) -> None:
        super().__init__()
        self.c, self.fault = c, fault
        self.up = nn.Linear(c.d, c.ff, bias=c.bias)
        self.down = nn.Linear(c.ff, c.d, bias=c.bias)
        if c.gated:
            self.gate = nn.Linear(c.d, c.ff, bias=c.bias)

    def forward(self, x: Tensor) -> Tensor:
        activation = ACTIVATIONS[str(self.fault.get("activation", self.c.activation))]
        up = self.up(x)
        if not self.c.gated:
            inner = activation(up)
        elif "gate-order" in self.fault:
            inner = self.gate(x) * activation(up)
        elif "gate-product" in self.fault:
            inner = activation(self.gate(x) * up)
        else:
            inner = activation(self.gate(x)) * up
        if "unlisted-feed-forward" in self.fault:
            inner = inner + 0.1 * inner.roll(1, -1)
        return self.down(inner)


def route(logits: Tensor, kind: str, k: int = 2) -> tuple[Tensor, Tensor]:
    """Weights and numbers of the experts of each token ``[N, k]``."""
    if kind == "top, softmax":
        value, index = logits.topk(k, -1)
        return value.softmax(-1), index
    share = logits.sigmoid() if kind.startswith("sigmoid") else logits.softmax(-1)
    value, index = share.topk(k, -1)
    if kind.endswith("renormalise"):
        value = value / value.sum(-1, keepdim=True)
    return value * (2.5 if kind.endswith("scaled") else 1.0), index


class Experts(nn.Module):
    """Each expert runs on its own tokens."""

    def __init__(self, c: Config, fault: Faults) -> None:
        super().__init__()
        self.kind = str(fault.get("expert-routing", c.routing))
        self.router = nn.Linear(c.d, c.experts, bias=False)
        only = fault.get("expert")
        self.experts = nn.ModuleList(
            FeedForward(c, fault if only in (None, i) else {}) for i in range(c.experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weight, index = route(self.router(flat), self.kind)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(index == number)
            out.index_add_(0, token, expert(flat[token]) * weight[token, place, None])
        return out.view_as(x)


class Config:
    """Sizes and the sound variant."""

    def __init__(self, **given: object) -> None:
        self.vocab, self.d, self.heads, self.kv, self.ff, self.layers = 31, 24, 6, 2, 40, 2
        self.norm, self.eps, self.placement, self.bias = "rms", 1e-6, "pre", True
        self.position, self.theta, self.rotary = "rope", 100.0, 4
        self.scale, self.cap, self.window, self.qk_norm = 0.5, None, None, False
        self.gated, self.activation, self.tied, self.head_bias = True, "silu", False, False
        self.embedding_scale, self.embedding_norm, self.residual = 1.0, False, "sequential"
        self.logit_cap, self.pad, self.pool = None, 0, None
        self.experts, self.routing = 0, "softmax, top, renormalise"
        for name, value in given.items():
            assert hasattr(self, name), name
            setattr(self, name, value)


class Layer(nn.Module):
    def __init__(self, c: Config, faults: Faults, index: int, causal: bool, cross: bool) -> None:
        super().__init__()
        at = faults.get("layer")
        fault = faults if at is None or at == index else {}
        self.c, self.fault, self.index = c, fault, index
        self.attention = Attention(c, fault, causal, False, index)
        self.attention_norm = Norm(c.d, c.norm, c.eps, fault)
        if cross:
            self.cross = Attention(c, fault, False, True, index)
            self.cross_norm = Norm(c.d, c.norm, c.eps, fault)
        self.ff = Experts(c, fault) if c.experts else FeedForward(c, fault)
        self.ff_norm = Norm(c.d, c.norm, c.eps, fault)

    def sublayer(self, x: Tensor, norm: Norm, body) -> Tensor:
        pre = self.c.placement == "pre"
        if "norm-placement" in self.fault:
            kind = self.fault["norm-placement"]
            if kind == "swap":
                pre = not pre
            elif kind == "residual":
                n = norm(x)
                return n + body(n)
        if pre:
            return x + body(norm(x)) * (0.5 if "residual-scale" in self.fault else 1.0)
        y = x + body(x)
        return y if "norm-missing-layer" in self.fault else norm(y)

    def forward(self, x, memory, real, memory_real, positions, bias) -> Tensor:
        parallel = (self.c.residual == "parallel") != ("parallel-residual" in self.fault)
        if parallel:
            read = self.attention_norm if "parallel-shared" in self.fault else self.ff_norm
            return x + self.attention(*[self.attention_norm(x)] * 2, real, positions, bias) + self.ff(read(x))
        x = self.sublayer(x, self.attention_norm, lambda h: self.attention(h, h, real, positions, bias))
        if memory is not None:
            cross = bias if "relative-bias-cross" in self.fault else None
            if cross is not None:
                cross = F.pad(cross, (0, memory.shape[1] - cross.shape[-1]))
            x = self.sublayer(
                x, self.cross_norm, lambda h: self.cross(h, memory, memory_real, positions, cross)
            )
        return self.sublayer(
            x, self.attention_norm if "norm-instance" in self.fault else self.ff_norm, self.ff
        )


def restarted(count: Tensor, documents: Tensor) -> Tensor:
    """Positions from 0 in every document."""
    new = torch.ones_like(documents).bool()
    new[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return count - torch.where(new, count, 0).cummax(1).values


class Stack(nn.Module):
    def __init__(self, c: Config, fault: Faults, causal: bool, cross: bool) -> None:
        super().__init__()
        self.c, self.fault, self.causal = c, fault, causal
        self.table = nn.Embedding(c.vocab, c.d)
        if c.position == "learned":
            self.places = nn.Embedding(64, c.d)
        if c.position == "relative":
            self.relative = nn.Embedding(8, c.heads)
        if c.embedding_norm:
            self.embedding_norm = Norm(c.d, c.norm, c.eps, {})
        self.layers = nn.ModuleList(Layer(c, fault, i, causal, cross) for i in range(c.layers))
        self.norm = Norm(c.d, c.norm, c.eps, {k: v for k, v in fault.items() if fault.get("layer") is None})

    def positions(self, real: Tensor, documents: Tensor | None) -> Tensor:
        count = (real.long().cumsum(-1) - 1).clamp(min=0)
        if documents is not None and "document-positions" not in self.fault:
            count = restarted(count, documents)
        if "position-padding" in self.fault:
            count = torch.arange(real.shape[1]).expand_as(count)
        return count

    def bias(self, t: int) -> Tensor | None:
        c = self.c
        far = torch.arange(t)[None] - torch.arange(t)[:, None]
        if c.position == "alibi":
            slope = 2.0 ** (-8 * torch.arange(1, c.heads + 1, dtype=torch.float64) / c.heads)
            if "alibi-slope" in self.fault:
                slope = 2.0 ** (-torch.arange(1, c.heads + 1, dtype=torch.float64))
            return (slope[:, None, None] * far).to(self.table.weight.dtype)
        if c.position == "relative":
            if "relative-bias-direction" in self.fault:
                far = -far
            shift = 3 if "relative-bias-buckets" in self.fault else 4
            return self.relative((far + shift).clamp(0, 7)).permute(2, 0, 1)
        return None

    def forward(self, ids: Tensor, real: Tensor, memory=None, memory_real=None, documents=None) -> Tensor:
        c, positions = self.c, self.positions(real, documents)
        scale = c.embedding_scale * (c.d**0.5 if "embedding-scale" in self.fault else 1.0)
        x = self.table(ids) * scale
        if c.position == "learned":
            x = x + self.places(positions + (1 if "position-offset" in self.fault else 0))
        if c.position == "sinusoid":
            start = 1 if "position-offset" in self.fault else 0
            x = x + sinusoid(positions + start, c.d, "sinusoid-layout" in self.fault).to(x.dtype)
        if c.embedding_norm and "norm-missing-embedding" not in self.fault:
            x = self.embedding_norm(x)
        bias = self.bias(ids.shape[1])
        if documents is not None and "document-leak" not in self.fault:
            apart = documents[:, None, :, None] != documents[:, None, None]
            bias = torch.where(apart, -1e9, 0.0) if bias is None else bias.masked_fill(apart, -1e9)
        for layer in self.layers:
            x = layer(x, memory, real, memory_real, positions, bias)
            if "unlisted-stream" in self.fault and layer.index == 0:
                x = x + 0.1 * torch.sin(x)
        if c.placement == "post" or "norm-missing" in self.fault:
            return x
        return self.norm(self.norm(x)) if "norm-doubled" in self.fault else self.norm(x)


def sinusoid(positions: Tensor, d: int, interleaved: bool) -> Tensor:
    freq = 100.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angle = positions[..., None] * freq
    parts = (angle.sin(), angle.cos())
    return torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)


def pooled(x: Tensor, real: Tensor, kind: str) -> Tensor:
    """One vector a row."""
    rows, length = torch.arange(len(x)), x.shape[1]
    if kind in ("first", "last"):
        return x[:, 0 if kind == "first" else -1]
    if kind == "last-real":
        return x[rows, length - 1 - real.flip(1).long().argmax(1)]
    if kind == "max":
        return x.masked_fill(~real[..., None], -1e9).amax(1)
    if kind == "mean-all":
        return x.mean(1)
    return (x * real[..., None]).sum(1) / real.sum(1, keepdim=True)


class Head(nn.Module):
    def __init__(self, c: Config, fault: Faults) -> None:
        super().__init__()
        self.c, self.fault = c, fault
        self.head = nn.Linear(c.d, c.vocab, bias=c.head_bias)

    def forward(self, x: Tensor) -> Tensor:
        logits = F.linear(x, self.head.weight, None if "output-bias" in self.fault else self.head.bias)
        if self.c.logit_cap is not None and "logit-cap" not in self.fault:
            logits = self.c.logit_cap * torch.tanh(logits / self.c.logit_cap)
        return logits * 0.5 if "logit-scale" in self.fault else logits


class Decoder(nn.Module):
    def __init__(self, c: Config, fault: Faults | None = None, causal: bool = True) -> None:
        super().__init__()
        fault = fault or {}
        self.pool = str(fault.get("pooling", c.pool)) if c.pool else None
        self.c, self.stack, self.lm = c, Stack(c, fault, causal, False), Head(c, fault)

    def forward(
        self, ids: Tensor, attention_mask: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        real = torch.ones_like(ids).bool() if attention_mask is None else attention_mask.bool()
        x = self.stack(ids, real, documents=documents)
        return self.lm(x if self.pool is None else pooled(x, real, self.pool))


class EncoderDecoder(nn.Module):
    def __init__(self, c: Config, fault: Faults | None = None) -> None:
        super().__init__()
        fault = fault or {}
        side = fault.get("side")
        self.c = c
        self.encoder = Stack(c, fault if side in (None, "encoder") else {}, False, False)
        self.decoder = Stack(c, fault if side in (None, "decoder") else {}, True, True)
        self.lm = Head(c, fault)

    def forward(self, src: Tensor, ids: Tensor, src_mask: Tensor) -> Tensor:
        real = src_mask.bool()
        memory = self.encoder(src, real)
        return self.lm(self.decoder(ids, torch.ones_like(ids).bool(), memory, real))


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights that hide nothing: gains and biases too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)
            if p.dim() > 1:
                p.copy_(noise * (1.0 if "table" in name or "places" in name else 0.3))
            else:
                p.copy_(0.3 * noise + (1.0 if name.endswith("weight") else 0.0))
    return model.eval()


def twins(kind: type, fault: Faults, **config: object) -> tuple[nn.Module, nn.Module]:
    """A sound model and one with a fault, with the same weights."""
    a, b = randomise(kind(Config(**config))), kind(Config(**config), fault)
    b.load_state_dict(a.state_dict(), strict=False)
    return a, b.eval()
