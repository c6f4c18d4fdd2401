"""What is planted, what must be found, and in which model."""

from __future__ import annotations

import random
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

RELATIVE = {"position": "relative"}
LEARNED = {"position": "learned"}
EXPERTS = {"experts": 4}
LAYER = {"norm": "layer"}
ROPE = {"position": "rope"}
GATED = {"gated": True, "activation": "silu"}
PRE = {"placement": "pre", "residual": "sequential"}
QK = {"qk_norm": True}

SOUND = [
    Planted((), {"expert-routing": "top, softmax"}, EXPERTS),
    Planted((), {}, {**BERT, "pool": "mean"}, "encoder"),
    Planted((), {"document-positions": 1}, {}, documents=True),  # rotations see distances alone
    Planted((), {"position-padding": 1}, {}, left=True),  # likewise
    Planted((), {}),
    Planted((), {}, ORIGINAL),
    Planted((), {}, BERT, "encoder"),
    Planted((), {}, {}, "both"),
    Planted((), {}, ORIGINAL, "both"),
    Planted((), {}, {"cap": 2.0, "qk_norm": True, "window": 4}),
    Planted((), {}, {"position": "alibi"}),
    Planted((), {}, {"position": "relative", "residual": "parallel"}),
    Planted((), {}, {**EXPERTS, "kv": 6, "position": "relative"}, "encoder"),
    Planted((), {}, {"cap": 2.0, "logit_cap": 3.0, "head_bias": True}, "both"),
]

ALL = ("decoder", "encoder", "both")


class Row(NamedTuple):
    """A row of the list of deviations.

    Args:
        slug: what must be found.
        fault: what is planted; a string for the plain one of that name.
        config: of both models.
        kinds: the models in which it makes sense.
        styles: those in which it can be written.
        rest: further fields of `Planted`.
    """

    slug: str
    fault: str | Faults
    config: Mapping[str, Any] = MappingProxyType({})
    kinds: tuple[str, ...] = ALL
    styles: tuple[str, ...] = ("steps", "packed")
    rest: Mapping[str, Any] = MappingProxyType({})


_LEFT = {"left": True}
_APART = {"documents": True}
_ONE = ("decoder", "encoder")
_CAUSAL = ("decoder", "both")
TABLE = [
    Row("embedding-scale", "embedding-scale"),
    Row("embedding-scale", "embedding-scale", ORIGINAL),
    Row("position-offset", "position-offset", LEARNED),
    Row("position-offset", "position-offset", ORIGINAL),
    Row("position-padding", "position-padding", LEARNED, rest=_LEFT),
    Row("sinusoid-layout", "sinusoid-layout", ORIGINAL),
    Row("sinusoid-layout", "sinusoid-layout", {"position": "sinusoid"}),
    Row("rope-pairing", "rope-pairing", ROPE),
    Row("rope-frequency", "rope-frequency", ROPE),
    Row("rope-frequency", "rope-scaling", ROPE),
    Row("rope-partial", "rope-partial", ROPE),
    Row("rope-axis", "rope-axis", ROPE),
    Row("rope-precision", "rope-precision", ROPE),
    Row("alibi-slope", "alibi-slope", {"position": "alibi"}),
    Row("relative-bias", "relative-bias", RELATIVE),
    Row("relative-bias", "relative-bias-direction", RELATIVE),
    Row("relative-bias", "relative-bias-buckets", RELATIVE),
    Row("relative-bias", "relative-bias-cross", RELATIVE, ("both",)),
    Row("attention-scale", "attention-scale"),
    Row("attention-scale", {"attention-scale": 1.0, "layer": 1}, BERT, ("encoder",)),
    Row("attention-scale", {"attention-scale": 0.25, "layer": 0}, ORIGINAL, _CAUSAL),
    Row("softcap", "softcap", {"cap": 2.0}),
    Row("softcap", "logit-cap", {"logit_cap": 3.0}),
    Row("softcap", "logit-scale"),
    Row("softcap", "residual-scale", PRE),
    Row("qkv-packing", "qkv-packing", {"kv": 6}),
    Row("qkv-packing", "qkv-packing", {**ORIGINAL, "bias": False}),
    Row("weight-transpose", "weight-transpose"),
    Row("kv-head-order", "kv-head-order", {"kv": 2}),
    Row("kv-head-order", "kv-head-order", {**BERT, "kv": 3}, ("encoder",)),
    Row("head-merge", "head-merge"),
    Row("bias-missing", "bias-missing", {"bias": True}),
    Row("bias-missing", "bias-missing", BERT, ("encoder",)),
    Row("output-bias", "output-bias", {"head_bias": True}),
    Row("activation", {"activation": "gelu"}, GATED),
    Row("activation", {"activation": "gelu-tanh"}, {"gated": False, "activation": "gelu"}),
    Row("activation", {"activation": "softsign", "layer": 1}, BERT, ("encoder",)),
    Row("activation", {"activation": "relu2"}, ORIGINAL, ("both",)),
    Row("gate-order", "gate-order", GATED),
    Row("gate-order", "gate-product", GATED),
    Row("norm-eps", "norm-eps"),
    Row("norm-eps", {"norm-eps": 1, "layer": 1}, ORIGINAL),
    Row("norm-eps", "norm-outside", {**LAYER, "eps": 1e-3}),
    Row("norm-eps", "norm-unbiased", LAYER),
    Row("norm-placement", {"norm-placement": "swap"}, PRE),
    Row("norm-placement", {"norm-placement": "residual"}, PRE),
    Row("norm-placement", {"norm-placement": "swap"}, {"placement": "post"}),
    Row("norm-missing", "norm-missing", PRE),
    Row("norm-missing", "norm-doubled", PRE),
    Row("norm-missing", "norm-missing-embedding", {"embedding_norm": True}),
    Row("norm-missing", "norm-missing-layer", {"placement": "post"}),
    Row("norm-missing", "norm-instance", {**LAYER, "residual": "sequential"}),
    Row("norm-offset", "norm-offset"),
    Row("qk-norm", "qk-norm", QK),
    Row("qk-norm", "qk-norm-order", {**QK, **ROPE}),
    Row("qk-norm", "qk-norm-axis", QK),
    Row("parallel-residual", "parallel-residual", PRE, _ONE),
    Row("parallel-residual", "parallel-residual", {"placement": "pre", "residual": "parallel"}, _ONE),
    Row("parallel-residual", "parallel-shared", {"placement": "pre", "residual": "parallel"}, _ONE),
    Row("mask-polarity", {"mask-polarity": "ignored"}, rest=_LEFT),
    Row("mask-polarity", {"mask-polarity": "inverted"}, kinds=_ONE, rest=_LEFT),
    Row("mask-polarity", {"mask-polarity": "added"}, rest=_LEFT),
    Row("mask-polarity", {"mask-polarity": "ignored"}, BERT, ("encoder",)),
    Row("mask-polarity", "mask-row", BERT, ("encoder",)),
    Row("causality", "causality", kinds=_CAUSAL),
    Row("causality", "causality-off", kinds=_CAUSAL),
    Row("causality", {"causality": 1, "layer": 1}, kinds=_CAUSAL),
    Row("sliding-window", "sliding-window", {"window": 4}, _CAUSAL),
    Row("sliding-window", "sliding-window-lost", {"window": 4}, _CAUSAL),
    Row("cross-mask", "cross-mask", kinds=("both",)),
    Row("cross-mask", {"cross-mask": 1, "layer": 0}, ORIGINAL, ("both",)),
    Row("document-leak", "document-leak", kinds=("decoder",), rest=_APART),
    Row("document-leak", "document-leak", BERT, ("encoder",), rest=_APART),
    Row("document-leak", "document-positions", BERT, ("encoder",), rest=_APART),
    Row("pooling", {"pooling": "mean-all"}, {**BERT, "pool": "mean"}, ("encoder",)),
    Row("pooling", {"pooling": "last"}, {"pool": "last-real"}, _ONE),
    Row("expert-routing", {"expert-routing": "softmax, top"}, EXPERTS),
    Row("expert-routing", {"expert-routing": "sigmoid, top, renormalise", "layer": 1}, EXPERTS),
    Row("expert-routing", {"expert-routing": "softmax, top, scaled"}, {**EXPERTS, "routing": "softmax, top"}),
    Row("activation", {"activation": "gelu", "expert": 1, "layer": 0}, EXPERTS, styles=("steps",)),
    Row("gate-order", {"gate-order": 1, "expert": 2, "layer": 1}, EXPERTS, styles=("steps",)),
    Row("unexplained", {"unlisted-feed-forward": 1, "expert": 2}, EXPERTS, ("decoder",), ("steps",)),
    Row("unexplained", "norm-kind", LAYER),
    Row("unexplained", "unlisted-attention"),
    Row("unexplained", "unlisted-feed-forward"),
    Row("unexplained", "unlisted-stream"),
]
_STEPS_ONLY = frozenset(
    (
        *("norm-instance", "parallel-shared", "qk-norm-axis"),
        *("relative-bias-buckets", "relative-bias-cross", "rope-scaling"),
    )
)


def grid() -> list[tuple[Planted, str, bool]]:
    """Every row in every model and style in which it makes sense; True: one of the few for every run."""
    found: list[tuple[Planted, str, bool]] = []
    for number, row in enumerate(TABLE):
        fault: Faults = {row.fault: 1} if isinstance(row.fault, str) else row.fault
        styles = row.styles if not _STEPS_ONLY & set(fault) else ("steps",)
        chosen = row.kinds[number // 2 % len(row.kinds)], styles[number // 4 % len(styles)]
        for kind in row.kinds:
            for style in styles:
                planted = Planted((row.slug,), fault, row.config, kind, **row.rest)
                found.append((planted, style, number % 2 == 0 and (kind, style) == chosen))
    return found


_HIDDEN = (
    # One of these hides the other, or the two are one change of the function.
    {"rope-axis", "rope-frequency", "rope-partial", "rope-pairing", "rope-precision"},
    {"mask-polarity", "causality", "sliding-window", "cross-mask", "document-leak"},
    {"norm-placement", "norm-missing", "parallel-residual"},
    {"expert-routing", "norm-eps"},  # an expert without tokens cannot be asked about others
)


def stacked(size: int, count: int, seed: int = 7) -> list[tuple[Planted, str]]:
    """A sample of faults that stand together in one model."""
    chance = random.Random(seed)
    rows = [r for r in TABLE if r.slug != "unexplained" and not {"layer", "expert"} & set(r.fault)]
    found: list[tuple[Planted, str]] = []
    while len(found) < count:
        chosen = chance.sample(rows, size)
        slugs = {row.slug for row in chosen}
        kinds = [k for k in ALL if all(k in row.kinds for row in chosen)]
        faults = [{row.fault: 1} if isinstance(row.fault, str) else row.fault for row in chosen]
        items = [item for row in chosen for item in row.config.items()]
        config = dict(items)
        styles = ["steps"] if any(_STEPS_ONLY & set(f) for f in faults) else ["steps", "packed"]
        apart = any(len(slugs & group) > 1 for group in _HIDDEN)
        if len(slugs) < size or not kinds or apart or any(config[k] != v for k, v in items):
            continue
        fault = {k: v for f in faults for k, v in f.items()}
        rest = {k: v for row in chosen for k, v in row.rest.items()}
        kind = chance.choice(kinds)
        if rest and kind == "both":
            continue
        planted = Planted(tuple(row.slug for row in chosen), fault, config, kind, **rest)
        style = chance.choice(styles)
        plain_experts = any("experts" in row.config for row in chosen) and not config.get("gated", True)
        found.append((planted, "steps" if plain_experts else style))  # the packed experts are gated
    return found


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
        {"norm-placement": "swap", "activation": "silu", "sinusoid-layout": 1},
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
        ("mask-polarity", "rope-partial", "attention-scale"),
        {"mask-polarity": "inverted", "rope-partial": 1, "attention-scale": 1},
        ROPE,
        left=True,
    ),
    Planted(
        ("weight-transpose", "output-bias", "activation"),
        {"weight-transpose": 1, "output-bias": 1, "activation": "relu"},
        {"head_bias": True},
    ),
]

__all__ = ["IDS", "REAL", "SOUND", "STACKED", "Planted", "grid", "models", "stacked", "twins"]
