"""The encoder–decoder of a tutorial: ``clones``, ``SublayerConnection``, four linears an attention."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

WIDTH, HEADS, VOCABULARY = 24, 3, 37
Faults = frozenset[str]


def clones(module: nn.Module, n: int) -> nn.ModuleList:
    return nn.ModuleList([copy.deepcopy(module) for _ in range(n)])


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, faults: Faults) -> Tensor:
    scores = torch.matmul(q, k.transpose(-2, -1))
    if "attention-scale" not in faults:
        scores = scores / math.sqrt(q.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    weights = scores.softmax(dim=-1)
    if "after-softmax" in faults:
        weights = weights / (weights.sum(-2, keepdim=True) + 1.0)
    return torch.matmul(weights, v)


class MultiHeadedAttention(nn.Module):
    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.faults = faults
        self.linears = clones(nn.Linear(WIDTH, WIDTH), 4)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            mask = mask.unsqueeze(1)
        n = query.size(0)
        order = (1, 0, 2) if "query-key" in self.faults else (0, 1, 2)
        query, key, value = [
            self.linears[i](x).view(n, -1, HEADS, WIDTH // HEADS).transpose(1, 2)
            for i, x in zip(order, (query, key, value), strict=True)
        ]
        x = attention(query, key, value, mask, self.faults)
        if "head-merge" not in self.faults:
            x = x.transpose(1, 2)
        return self.linears[-1](x.contiguous().view(n, -1, WIDTH))


class LayerNorm(nn.Module):
    """With the standard deviation of n − 1 and ε beside it, as the tutorial has it."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.faults = faults
        self.a_2, self.b_2 = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
        if "norm-eps" in self.faults:
            return (
                self.a_2 * (x - mean) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-6) + self.b_2
            )
        return self.a_2 * (x - mean) / (std + 1e-6) + self.b_2


class SublayerConnection(nn.Module):
    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.faults = faults
        self.norm = LayerNorm(faults)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        if "norm-placement" in self.faults:
            return self.norm(x + sublayer(x))
        return x + sublayer(self.norm(x))


class PositionwiseFeedForward(nn.Module):
    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.faults = faults
        self.w_1, self.w_2 = nn.Linear(WIDTH, 50), nn.Linear(50, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.w_1(x)
        y = torch.nn.functional.gelu(y) if "activation" in self.faults else y.relu()
        return self.w_2(y)


class EncoderLayer(nn.Module):
    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.self_attn, self.feed_forward = MultiHeadedAttention(faults), PositionwiseFeedForward(faults)
        self.sublayer = clones(SublayerConnection(faults), 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, mask))
        return self.sublayer[1](x, self.feed_forward)


class DecoderLayer(nn.Module):
    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.faults = faults
        self.self_attn, self.src_attn = MultiHeadedAttention(faults), MultiHeadedAttention(faults)
        self.feed_forward = PositionwiseFeedForward(faults)
        self.sublayer = clones(SublayerConnection(faults), 3)

    def forward(self, x: Tensor, memory: Tensor, src_mask: Tensor, tgt_mask: Tensor) -> Tensor:
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, tgt_mask))
        value = memory.flip(1) if "memory-order" in self.faults else memory
        x = self.sublayer[1](x, lambda x: self.src_attn(x, memory, value, src_mask))
        return self.sublayer[2](x, self.feed_forward)


class Stack(nn.Module):
    def __init__(self, layer: nn.Module, faults: Faults) -> None:
        super().__init__()
        self.layers, self.norm, self.faults = clones(layer, 2), LayerNorm(faults), faults

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, *rest)
        return x if "norm-missing" in self.faults else self.norm(x)


class Embeddings(nn.Module):
    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.faults, self.lut = faults, nn.Embedding(VOCABULARY, WIDTH)
        position = torch.arange(0, 50).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, WIDTH, 2) * -(math.log(10000.0) / WIDTH))
        pe = torch.zeros(50, WIDTH)
        if "sinusoid-layout" in faults:
            pe[:, : WIDTH // 2], pe[:, WIDTH // 2 :] = (
                torch.sin(position * div_term),
                torch.cos(position * div_term),
            )
        else:
            pe[:, 0::2], pe[:, 1::2] = torch.sin(position * div_term), torch.cos(position * div_term)
        self.register_buffer("pe", pe.unsqueeze(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lut(x)
        if "embedding-scale" not in self.faults:
            y = y * math.sqrt(WIDTH)
        start = 1 if "position-offset" in self.faults else 0
        return y + self.pe[:, start : start + x.size(1)].requires_grad_(False)


class EncoderDecoder(nn.Module):
    """``src``, ``tgt`` → logarithms of probabilities; ``side`` is where the faults are, "": on both."""

    def __init__(self, *faults: str, side: str = "") -> None:
        super().__init__()
        given: Faults = frozenset(faults)
        enc, dec = (given if side in ("", s) else frozenset() for s in ("encoder", "decoder"))
        self.faults = given
        self.encoder = Stack(EncoderLayer(enc), enc)
        self.decoder = Stack(DecoderLayer(dec), dec)
        self.src_embed, self.tgt_embed = Embeddings(enc), Embeddings(dec)
        self.generator = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, src: Tensor, tgt: Tensor, src_key_padding_mask: Tensor) -> Tensor:
        src_mask = ~src_key_padding_mask.unsqueeze(-2)
        tgt_mask = torch.ones(1, tgt.size(1), tgt.size(1)).tril() == 1
        if "causality" in self.faults:
            tgt_mask = torch.ones_like(tgt_mask)
        memory = self.encoder(self.src_embed(src), src_mask)
        seen = torch.ones_like(src_mask) if "cross-mask" in self.faults else src_mask
        x = self.decoder(self.tgt_embed(tgt), memory, seen, tgt_mask)
        if "output-bias" in self.faults:
            return torch.nn.functional.linear(x, self.generator.weight).log_softmax(-1)
        return self.generator(x).log_softmax(-1)
