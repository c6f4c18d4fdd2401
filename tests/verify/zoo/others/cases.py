"""What is planted in models of other people's making, and what must be found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from ..steps import randomise
from .annotated import EncoderDecoder
from .buckets import Buckets
from .einsum import TimeFirst
from .general import Bert
from .nano import GPT
from .patches import Patches
from .relative import Relative
from .sandwich import Sandwich
from .sequential import Sequential

IDS = torch.randint(1, 33, (3, 11), generator=torch.Generator().manual_seed(4))
PADDED = torch.zeros(3, 11, dtype=torch.bool)
PADDED[1, 8:] = True
PADDED[2, 5:] = True
TYPES = (torch.arange(11) >= torch.tensor([5, 3, 5])[:, None]).long()
PREFIX = torch.tensor([3, 2, 4])

FORMS: dict[str, tuple[Callable[..., nn.Module], dict[str, Any], dict[str, Any]]] = {
    "nano": (GPT, {}, {"idx": IDS}),
    "annotated": (EncoderDecoder, {}, {"src": IDS, "tgt": IDS[:, 3:10], "src_key_padding_mask": PADDED}),
    "einsum": (TimeFirst, {}, {"ids": IDS, "padding_mask": PADDED}),
    "einsum-encoder": (TimeFirst, {"causal": False}, {"ids": IDS, "padding_mask": PADDED}),
    "einsum-window": (TimeFirst, {"window": 4}, {"ids": IDS, "padding_mask": PADDED}),
    "general": (Bert, {}, {"input_ids": IDS, "attention_mask": (~PADDED).long()}),
    "general-alibi": (Bert, {"alibi": True}, {"input_ids": IDS, "attention_mask": (~PADDED).long()}),
    "sequential": (Sequential, {}, {"x": IDS, "types": TYPES, "mask": ~PADDED.flip(1)}),
    "sequential-mean": (Sequential, {"pool": "mean"}, {"x": IDS, "types": TYPES, "mask": ~PADDED.flip(1)}),
    "relative": (Relative, {}, {"ids": IDS, "real": ~PADDED}),
    "relative-small": (Relative, {}, {"ids": IDS, "real": ~PADDED}),
    "relative-biased": (Relative, {"bias": True}, {"ids": IDS, "real": ~PADDED}),
    "relative-window": (Relative, {"window": 3}, {"ids": IDS, "real": ~PADDED}),
    "relative-prefix": (Relative, {"causal": True}, {"ids": IDS, "real": ~PADDED, "prefix_lengths": PREFIX}),
    "patches": (Patches, {}, {"x": torch.randn(3, 11, 10, generator=torch.Generator().manual_seed(3))}),
    "buckets": (
        Buckets,
        {},
        {
            "input_ids": torch.cat([IDS, IDS.flip(0)], 1),
            "attention_mask": (~torch.cat([PADDED.flip(1), PADDED], 1)).long(),
            "decoder_input_ids": torch.cat([IDS.flip(1), IDS[:, :8]], 1),
        },
    ),
    "sandwich": (Sandwich, {}, {"input_ids": IDS, "attention_mask": (~PADDED).long()}),
    "sandwich-left": (Sandwich, {}, {"input_ids": IDS, "attention_mask": (~PADDED.flip(1)).long()}),
    "general-pooled": (Bert, {"pooled": True}, {"input_ids": IDS, "attention_mask": (~PADDED).long()}),
}


class Other(NamedTuple):
    """A case: the form, what is planted, the slugs to be found.

    Args:
        form: a key of `FORMS`.
        faults: what is planted.
        found: the slugs; empty: the models are the same function.
        part: what the first finding's place must begin with.
        rest: where it is planted.
    """

    form: str
    faults: tuple[str, ...]
    found: tuple[str, ...]
    part: str = ""
    rest: Mapping[str, Any] = MappingProxyType({})

    def __str__(self) -> str:
        return f"{self.form}:{'+'.join(self.faults)}" + "".join(f",{k}={v}" for k, v in self.rest.items())


def models(case: Other) -> tuple[nn.Module, nn.Module, dict[str, Any]]:
    """Reference, candidate, and what both read."""
    kind, config, inputs = FORMS[case.form]
    a = randomise(kind(**config))
    if case.form.endswith("-small"):  # as far from the probe's weights as at the start of training
        for weight in a.parameters():
            weight.data *= 0.1 if weight.dim() > 1 else 1.0
    if isinstance(a, Sandwich):
        return a, a.ported(*case.faults, **case.rest).eval(), inputs
    b = kind(*case.faults, **config, **case.rest)
    b.load_state_dict(a.state_dict(), strict=not case.rest.get("together", False))
    if case.rest.get("together"):
        b.keep_together()
    return a, b.eval(), inputs


def _same(form: str, *slugs: str) -> list[Other]:
    """Faults that are called as their slugs are."""
    return [Other(form, (slug,), (slug,)) for slug in slugs]


LISTED = [
    *_same(
        "nano",
        *(
            "embedding-scale",
            "position-offset",
            "attention-scale",
            "softcap",
            "qkv-packing",
            "weight-transpose",
        ),
        *("head-merge", "bias-missing", "activation", "norm-eps", "norm-placement", "norm-missing"),
        *("parallel-residual", "causality"),
    ),
    Other("nano", ("norm-instance",), ("norm-missing",)),
    Other("nano", ("logit-cap",), ("softcap",), "result"),
    Other("nano", ("residual-scale",), ("softcap",)),
    Other("nano", ("attention-scale",), ("attention-scale",), "self-attention", {"at": 1}),
    Other("nano", ("activation",), ("activation",), "feed-forward", {"at": 2}),
    Other("nano", ("norm-eps", "activation"), ("norm-eps", "activation")),
    *_same(
        "annotated",
        *("embedding-scale", "position-offset", "sinusoid-layout", "attention-scale", "head-merge"),
        *(
            "activation",
            "norm-eps",
            "norm-placement",
            "causality",
            "cross-mask",
            "output-bias",
        ),
    ),
    Other("annotated", ("activation",), ("activation",), "feed-forward", {"side": "encoder"}),
    Other("annotated", ("attention-scale",), ("attention-scale",), "self-attention", {"side": "decoder"}),
    Other("annotated", ("norm-missing",), ("norm-missing",)),  # one of each side
    Other("annotated", ("norm-missing",), ("norm-missing",), "", {"side": "encoder"}),
    Other(
        "annotated",
        ("sinusoid-layout", "cross-mask", "norm-eps"),
        ("sinusoid-layout", "cross-mask", "norm-eps"),
    ),
    *_same(
        "einsum",
        *("norm-eps", "norm-offset", "rope-frequency", "rope-pairing", "qk-norm", "kv-head-order"),
        *("attention-scale", "gate-order", "activation", "causality", "norm-missing", "output-bias"),
    ),
    *_same("einsum-encoder", "rope-pairing", "mask-polarity", "kv-head-order", "gate-order"),
    *_same("einsum-window", "sliding-window", "rope-frequency"),
    Other(
        "einsum", ("kv-head-order", "attention-scale"), ("kv-head-order", "attention-scale"), "", {"at": 0}
    ),
    Other("einsum", ("qk-norm", "attention-scale"), ("qk-norm", "attention-scale")),
    Other("einsum", ("rope-pairing", "gate-order"), ("rope-pairing", "gate-order"), "", {"at": 1}),
    *_same(
        "general",
        *("norm-eps", "bias-missing", "attention-scale", "head-merge", "activation"),
        *("position-offset", "norm-missing", "mask-polarity"),
    ),
    Other("general", ("norm-bias",), ("bias-missing",)),
    Other("general", ("norm-missing-layer",), ("norm-missing",), "", {"at": 1}),
    *_same("general-alibi", "alibi-slope", "norm-eps"),
    *_same("general-pooled", "pooling", "norm-eps", "activation"),
    Other("general-pooled", ("pooler-activation",), ("activation",)),
    *_same("patches", "qk-norm", "activation"),
    Other("patches", ("qk-exchanged",), ("qk-norm",), "self-attention", {"at": 1}),
    Other("patches", ("qk-eps",), ("norm-eps",), "self-attention", {"at": 1}),
    Other("patches", ("front", "activation"), ("activation",), "feed-forward", {"at": 1}),
    *_same("buckets", "weight-transpose", "norm-offset", "norm-missing", "norm-placement"),
    Other("buckets", ("key-value",), ("qkv-packing",), "", {"side": "decoder", "at": 1}),
    Other("buckets", ("norm-doubled",), ("norm-missing",)),
    Other("buckets", ("norm-doubled", "norm-offset"), ("norm-missing", "norm-offset")),
    Other("buckets", ("norm-placement", "norm-eps"), ("norm-placement", "norm-eps")),
    Other("buckets", ("window",), ("sliding-window",), "self-attention"),
    *_same("sequential", "position-padding", "norm-missing", "parallel-residual", "pooling", "bias-missing"),
    Other("sequential", ("norm-late", "norm-eps"), ("norm-eps",), "", {"at": 1}),
    Other("sequential-mean", ("norm-late", "norm-eps"), ("norm-placement", "norm-eps")),
    Other("sequential-mean", ("norm-late",), ("norm-placement",)),
    Other("sequential", ("window",), ("sliding-window",)),
    Other("sequential", ("norm-doubled",), ("norm-missing",)),
    Other("sequential-mean", ("parallel-residual",), ("parallel-residual",), "feed-forward", {"at": 0}),
    Other("sequential-mean", ("norm-missing",), ("norm-missing",), "stream after the sum", {"at": 1}),
    Other("sequential-mean", ("norm-missing", "pooling"), ("norm-missing", "pooling")),
    Other("relative", ("embedding-scale",), ("embedding-scale",), "embedding"),
    Other("relative", ("widened-scale",), ("embedding-scale",), "embedding"),
    Other("relative", ("zeroed-padding", "widened-scale"), ("embedding-scale",), "embedding"),
    Other("relative", ("zeroed-padding", "norm-factor"), ("softcap",), "stream after the sum", {"at": 1}),
    Other("relative", ("quiet-padding", "scale-all"), ("attention-scale",), "self-attention"),
    Other("relative", ("mirrored-query",), ("relative-bias",), "self-attention"),
    Other("relative", ("near-query",), ("relative-bias",), "self-attention", {"at": 1}),
    Other("relative", ("mirrored-key",), ("relative-bias",), "self-attention"),
    Other("relative-biased", ("no-query",), ("relative-bias",), "self-attention", {"at": 2}),
    Other("relative", ("norm-factor",), ("softcap",), "stream after the sum", {"at": 1}),
    Other("relative", ("logit-scale",), ("softcap",), "result"),
    Other("relative", ("logit-scale-all",), ("softcap",), "result"),
    # Whatever scores hold is scaled with them: that is one deviation.
    Other("relative-biased", ("scale-all",), ("attention-scale",), "self-attention"),
    Other("relative-biased", ("content-scale",), ("attention-scale",), "self-attention", {"at": 1}),
    Other("relative-biased", ("unpadded", "content-scale"), ("attention-scale",), "self-attention"),
    Other("relative-window", ("window",), ("sliding-window",), "self-attention"),
    Other("relative-window", ("window-shift",), ("sliding-window",), "self-attention"),
    *(Other("relative-prefix", (f"prefix-{x}",), ("causality",)) for x in ("long", "short", "none")),
    Other("relative-prefix", ("window",), ("causality", "sliding-window"), "", {"window": 3}),
]

_AT = {"at": 1}
LISTED += [
    *_same(
        "sandwich",
        *("norm-eps", "norm-offset", "rope-frequency", "rope-partial", "rope-pairing", "kv-head-order"),
        *("attention-scale", "softcap", "causality", "sliding-window", "head-merge", "gate-order"),
        *("activation", "norm-missing", "parallel-residual", "embedding-scale", "output-bias"),
    ),
    *(Other("sandwich-left", (x,), (x,), "", _AT) for x in ("mask-polarity", "head-merge", "softcap")),
    Other("sandwich", ("cap-value",), ("softcap",), "self-attention", _AT),
    Other("sandwich", ("sliding-lost",), ("sliding-window",), "self-attention", {"at": 2}),
    Other("sandwich", ("sliding-layers",), ("sliding-window",)),
    Other("sandwich", ("norm-missing-behind",), ("norm-placement",), "sum of the stream", _AT),
    Other("sandwich", ("norm-instance",), ("norm-missing",), "stream as read by feed-forward"),
    Other("sandwich", ("residual-scale",), ("softcap",), "sum of the stream", _AT),
    Other("sandwich", ("final-norm",), ("norm-missing",)),
    Other("sandwich", ("logit-cap",), ("softcap",), "result"),
    # What is behind the scores is compared also where they differ.
    Other("sandwich", ("cap-value", "head-merge"), ("softcap", "head-merge"), "self-attention", _AT),
    Other("sandwich", ("kv-head-order", "head-merge"), ("kv-head-order", "head-merge"), "", _AT),
    Other("sandwich", ("attention-scale", "norm-missing-behind"), ("attention-scale", "norm-placement")),
    Other("sandwich", ("sliding-layers", "output-bias"), ("sliding-window", "output-bias")),
]
UNLISTED = [
    # A sum that is lost does not hide what comes behind it.
    Other("nano", ("skip-missing", "activation"), ("unexplained", "activation"), "", _AT),
    Other("nano", ("skip-missing", "norm-eps"), ("unexplained", "norm-eps"), "", _AT),
    Other(
        "nano",
        ("skip-missing", "attention-scale", "bias-missing"),
        ("unexplained", "attention-scale", "bias-missing"),
    ),
    Other("general", ("skip-missing", "norm-eps"), ("unexplained", "norm-eps"), "", {"at": 0}),
    Other("nano", ("layer-order", "activation"), ("unexplained", "activation")),
    Other("nano", ("norm-kind",), ("unexplained",)),
    Other("nano", ("norm-kind-bare",), ("unexplained",), "stream as read"),
    Other("nano", ("value-scale",), ("unexplained",), "self-attention"),
    Other("nano", ("value-scale",), ("unexplained",), "self-attention", {"at": 1}),
    Other("nano", ("temperature",), ("unexplained",), "self-attention"),
    Other("nano", ("softmax-axis",), ("unexplained",), "self-attention", {"at": 2}),
    Other("nano", ("talking-heads",), ("unexplained",), "self-attention"),
    Other("nano", ("activation-own",), ("activation",), "feed-forward"),
    Other("nano", ("order",), ("unexplained",)),
    Other("nano", ("skip-missing",), ("unexplained",), "", {"at": 1}),
    Other("nano", ("skip",), ("unexplained",)),
    Other("nano", ("layer-order",), ("unexplained",)),
    Other("nano", ("layer-twice",), ("unexplained",)),
    Other("annotated", ("after-softmax",), ("unexplained",), "", {"side": "decoder"}),
    Other("annotated", ("query-key",), ("qkv-packing",), "self-attention", {"side": "encoder"}),
    Other("annotated", ("memory-order",), ("unexplained",), "stream as read by cross", {"side": "decoder"}),
    Other("einsum", ("rope-direction",), ("rope-pairing",), "self-attention"),
    Other("einsum", ("key-shift",), ("unexplained",), "self-attention"),
    Other("einsum", ("sink",), ("unexplained",), "self-attention"),
    Other("einsum", ("gate-sum",), ("unexplained",), "feed-forward"),
    Other("general", ("weights-shift",), ("unexplained",), "self-attention"),
    Other("general", ("kind-missing",), ("unexplained",), "embedding"),
    Other("general", ("skip-missing",), ("unexplained",), "", {"at": 0}),
    Other("general", ("written-softmax",), ()),
    Other("patches", ("front",), ()),
    Other("buckets", ("sink",), ("unexplained",), "self-attention"),
    Other("buckets", ("own-keys",), ("unexplained",), "cross-attention", _AT),
    Other("sequential", ("norm-late",), ()),
    Other("sequential", ("token-shift",), ("unexplained",), "self-attention"),
    Other("sequential", ("skip-missing",), ("unexplained",)),
    Other("sequential", ("ids-shift",), ("decode-protocol",), "embedding"),
    Other("sequential", ("layer-order",), ("unexplained",)),
    Other("sequential-mean", ("layer-twice",), ("tie-lost",), "self-attention", _AT),
    Other("sandwich", ("head-dropped",), ("unexplained",), "self-attention", _AT),
    Other("sandwich", ("value-scale",), ("unexplained",), "self-attention", _AT),
    *(Other("sandwich", (x,), ("unexplained",), "feed-forward", _AT) for x in ("sign", "mean-out")),
    Other("sandwich", ("token-shift",), ("unexplained",), "stream as read by attention", _AT),
    Other("sandwich", ("layers-swapped",), ("unexplained",)),
    Other("sandwich", ("rope-frequency", "value-scale"), ("rope-frequency", "unexplained")),
    Other("relative", ("late-scale",), ("unexplained",), "self-attention", _AT),
    Other("relative", ("quiet-padding", "late-scale"), ("unexplained",), "self-attention", _AT),
]


SOUND = [
    *(Other(form, (), ()) for form in FORMS),
    Other("relative", ("unpadded",), ()),
    Other("relative", ("quiet-padding",), ()),
    Other("relative", ("zeroed-padding",), ()),
    Other("relative", (), (), "", {"together": True}),
    Other("relative-small", (), (), "", {"together": True}),
    Other("relative-prefix", ("prefix-queries",), ()),
]
