"""What is planted, what must be found, and in which model."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from .packed import Packed
from .steps import Config, Decoder, EncoderDecoder, Faults, randomise, twins

IDS = torch.randint(1, 31, (3, 10), generator=torch.Generator().manual_seed(1))
REAL = torch.ones_like(IDS)
REAL[1, 7:] = 0
REAL[2, 5:] = 0

DOCUMENTS = (torch.arange(10)[None] >= torch.tensor([[4], [3], [2]])).long()


class Planted(NamedTuple):
    """A case: the slugs to be found, the fault, the model."""

    found: tuple[str, ...]
    fault: Faults
    config: Mapping[str, Any] = MappingProxyType({})
    kind: str = "decoder"
    left: bool = False
    documents: bool = False

    def __str__(self) -> str:
        where = "".join(f",{k}={v}" for k, v in self.config.items() if k in ("position", "placement"))
        return f"{self.kind}:{'+'.join(map(str, self.fault)) or 'sound'}{where}"


def models(case: Planted, style: str) -> tuple[nn.Module, nn.Module, dict[str, Any], dict[str, Any]]:
    """Reference, candidate in a style, and what each reads."""
    real = REAL.flip(1) if case.left else REAL
    config = Config(**case.config)
    if case.kind == "both":
        a: Any = randomise(EncoderDecoder(config))
        ours: dict[str, Any] = {"src": IDS, "ids": IDS[:, :6], "src_mask": real}
        packed = {"src": IDS, "ids": IDS[:, :6], "attention_mask": real}
    else:
        a = randomise(Decoder(config, causal=case.kind == "decoder"))
        ours = packed = {"ids": IDS, "attention_mask": real}
        if case.documents:
            ours = packed = {**ours, "documents": DOCUMENTS}
    if style == "packed":
        return a, Packed(a, case.fault).eval(), ours, packed
    b: Any = EncoderDecoder(config, case.fault) if case.kind == "both" else None
    if b is None:
        b = Decoder(config, case.fault, causal=case.kind == "decoder")
    b.load_state_dict(a.state_dict(), strict=False)
    return a, b.eval(), ours, ours


ORIGINAL = {
    "position": "sinusoid",
    "norm": "layer",
    "gated": False,
    "activation": "relu",
    "placement": "post",
    "kv": 6,
}
BERT = {
    "position": "learned",
    "norm": "layer",
    "gated": False,
    "activation": "gelu",
    "placement": "post",
    "kv": 6,
    "embedding_norm": True,
}

EXPERTS = {"experts": 4}
ROUTED = [
    Planted(("expert-routing",), {"expert-routing": "softmax, top"}, EXPERTS),
    Planted(("expert-routing",), {"expert-routing": "sigmoid, top, renormalise", "layer": 1}, EXPERTS),
    Planted(
        ("expert-routing",),
        {"expert-routing": "softmax, top, scaled"},
        {**EXPERTS, "routing": "softmax, top"},
    ),
]
POOLED = [
    Planted(("pooling",), {"pooling": "mean-all"}, {**BERT, "pool": "mean"}, "encoder"),
    Planted(("pooling",), {"pooling": "last"}, {"pool": "last-real"}),
    Planted(("pooling", "norm-missing"), {"pooling": "last", "norm-missing": 1}, {"pool": "last-real"}),
]
PARTED = [
    Planted(("document-leak",), {"document-leak": 1}, documents=True),
    Planted(("document-leak",), {"document-leak": 1}, BERT, "encoder", documents=True),
    Planted(("document-leak",), {"document-positions": 1}, BERT, "encoder", documents=True),
]

SOUND = [
    Planted((), {"expert-routing": "top, softmax"}, EXPERTS),
    Planted((), {}, {**BERT, "pool": "mean"}, "encoder"),
    Planted((), {"document-positions": 1}, {}, documents=True),  # rotations see distances alone
    Planted((), {}),
    Planted((), {}, ORIGINAL),
    Planted((), {}, BERT, "encoder"),
    Planted((), {}, {}, "both"),
    Planted((), {}, ORIGINAL, "both"),
    Planted((), {}, {"cap": 2.0, "qk_norm": True, "window": 4}),
    Planted((), {}, {"position": "alibi"}),
    Planted((), {}, {"position": "relative", "residual": "parallel"}),
]


def _one(slug: str, *faults: str, **rest: Any) -> list[Planted]:
    return [Planted((slug,), {fault: 1}, **rest) for fault in faults]


STEPS = [
    *_one("embedding-scale", "embedding-scale"),
    *_one("position-offset", "position-offset", config={"position": "learned"}),
    *_one("sinusoid-layout", "sinusoid-layout", config={"position": "sinusoid"}),
    *_one("position-padding", "position-padding", config={"position": "learned"}, left=True),
    *_one("rope-pairing", "rope-pairing"),
    *_one("rope-frequency", "rope-frequency"),
    *_one("rope-partial", "rope-partial"),
    *_one("rope-axis", "rope-axis"),
    *_one("rope-precision", "rope-precision"),
    *_one("alibi-slope", "alibi-slope", config={"position": "alibi"}),
    *_one("relative-bias", "relative-bias", "relative-bias-direction", config={"position": "relative"}),
    *_one("attention-scale", "attention-scale"),
    *_one("softcap", "softcap", config={"cap": 2.0}),
    *_one("softcap", "logit-cap", config={"logit_cap": 3.0}),
    *_one("softcap", "logit-scale", "residual-scale"),
    *_one("kv-head-order", "kv-head-order"),
    *_one("head-merge", "head-merge"),
    *_one("bias-missing", "bias-missing"),
    *_one("output-bias", "output-bias", config={"head_bias": True}),
    Planted(("activation",), {"activation": "gelu"}),
    Planted(("activation",), {"activation": "gelu-tanh"}, {"gated": False, "activation": "gelu"}),
    Planted(("activation",), {"activation": "softsign"}, BERT, "encoder"),
    *_one("gate-order", "gate-order", "gate-product"),
    *_one("norm-eps", "norm-eps"),
    *_one("norm-eps", "norm-outside", config={"norm": "layer", "eps": 1e-3}),
    *_one("norm-eps", "norm-unbiased", config={"norm": "layer"}),
    Planted(("norm-placement",), {"norm-placement": "swap"}),
    Planted(("norm-placement",), {"norm-placement": "residual"}),
    Planted(("norm-placement",), {"norm-placement": "swap"}, {"placement": "post"}),
    *_one("norm-missing", "norm-missing", "norm-doubled"),
    *_one("norm-missing", "norm-missing-embedding", config={"embedding_norm": True}),
    *_one("norm-missing", "norm-missing-layer", config={"placement": "post"}),
    *_one("norm-offset", "norm-offset"),
    *_one("qk-norm", "qk-norm", "qk-norm-order", config={"qk_norm": True}),
    *_one("parallel-residual", "parallel-residual"),
    Planted(("mask-polarity",), {"mask-polarity": "ignored"}, left=True),
    Planted(("mask-polarity",), {"mask-polarity": "inverted"}, left=True),
    Planted(("mask-polarity",), {"mask-polarity": "added"}, left=True),
    *_one("causality", "causality", "causality-off"),
    *_one("sliding-window", "sliding-window", "sliding-window-lost", config={"window": 4}),
    *_one("cross-mask", "cross-mask", kind="both"),
    *_one("unexplained", "unlisted-attention", "unlisted-feed-forward", "unlisted-stream"),
    *_one("unexplained", "norm-kind", config={"norm": "layer"}),
]

STEPS += ROUTED + POOLED + PARTED

PACKED = [
    *ROUTED,
    *POOLED,
    *PARTED,
    *_one("embedding-scale", "embedding-scale"),
    *_one("position-offset", "position-offset", config=BERT, kind="encoder"),
    *_one("sinusoid-layout", "sinusoid-layout", config=ORIGINAL, kind="both"),
    *_one("position-padding", "position-padding", config={"position": "learned"}, left=True),
    *_one("rope-pairing", "rope-pairing", kind="both"),
    *_one("rope-frequency", "rope-frequency"),
    *_one("rope-partial", "rope-partial"),
    *_one("rope-axis", "rope-axis"),
    *_one("rope-precision", "rope-precision"),
    *_one("alibi-slope", "alibi-slope", config={"position": "alibi"}),
    Planted(("relative-bias",), {"relative-bias": 1, "layer": 1}, {"position": "relative"}),
    *_one("attention-scale", "attention-scale", config=BERT, kind="encoder"),
    *_one("softcap", "softcap", config={"cap": 2.0}),
    *_one("softcap", "residual-scale", kind="both"),
    *_one("kv-head-order", "kv-head-order"),
    *_one("head-merge", "head-merge", config=BERT, kind="encoder"),
    *_one("bias-missing", "bias-missing"),
    *_one("output-bias", "output-bias", config={"head_bias": True}),
    *_one("qkv-packing", "qkv-packing", config={"kv": 6}),
    *_one("weight-transpose", "weight-transpose"),
    Planted(("activation",), {"activation": "gelu-tanh"}, BERT, "encoder"),
    *_one("gate-order", "gate-order"),
    Planted(("norm-eps",), {"norm-eps": 1, "layer": 1}, BERT, "encoder"),
    *_one("norm-placement", "norm-placement", kind="both"),
    *_one("norm-placement", "norm-placement", config=ORIGINAL),
    *_one("norm-missing", "norm-missing"),
    *_one("norm-offset", "norm-offset"),
    *_one("qk-norm", "qk-norm", config={"qk_norm": True}),
    *_one("parallel-residual", "parallel-residual", config={"residual": "parallel"}),
    *_one("mask-polarity", "mask-polarity", "mask-row", config=BERT, kind="encoder"),
    *_one("cross-mask", "cross-mask", kind="both"),
    *_one("causality", "causality", kind="both"),
    *_one("sliding-window", "sliding-window", config={"window": 4}),
    *_one("unexplained", "norm-kind", config=BERT, kind="encoder"),
]

STACKED = [
    Planted(("attention-scale", "activation"), {"attention-scale": 1, "activation": "gelu"}),
    Planted(("rope-pairing", "norm-eps", "gate-order"), {"rope-pairing": 1, "norm-eps": 1, "gate-order": 1}),
    Planted(
        ("embedding-scale", "rope-frequency", "kv-head-order"),
        {"embedding-scale": 1, "rope-frequency": 1, "kv-head-order": 1},
    ),
    Planted(("attention-scale", "rope-pairing"), {"attention-scale": 1, "rope-pairing": 1}),
    Planted(("attention-scale", "kv-head-order"), {"attention-scale": 1, "kv-head-order": 1}),
    Planted(
        ("norm-placement", "activation", "sinusoid-layout"),
        {"norm-placement": 1, "activation": "silu", "sinusoid-layout": 1},
        ORIGINAL,
    ),
    Planted(("causality", "bias-missing"), {"causality": 1, "bias-missing": 1}),
    Planted(("rope-pairing", "rope-frequency"), {"rope-pairing": 1, "rope-frequency": 1}),
    Planted(("norm-eps", "norm-offset"), {"norm-eps": 1, "norm-offset": 1}),
    Planted(
        ("qkv-packing", "causality", "norm-missing"),
        {"qkv-packing": 1, "causality": 1, "norm-missing": 1},
        {"kv": 6},
    ),
    Planted(("cross-mask", "attention-scale"), {"cross-mask": 1, "attention-scale": 1}, {}, "both"),
    Planted(("sliding-window", "softcap"), {"sliding-window": 1, "softcap": 1}, {"cap": 2.0, "window": 4}),
    Planted(("head-merge", "rope-pairing"), {"head-merge": 1, "rope-pairing": 1}),
    Planted(
        ("weight-transpose", "output-bias", "activation"),
        {"weight-transpose": 1, "output-bias": 1, "activation": "relu"},
        {"head_bias": True},
    ),
]

__all__ = ["IDS", "PACKED", "REAL", "SOUND", "STACKED", "STEPS", "Planted", "models", "twins"]
