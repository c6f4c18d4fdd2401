"""Does a position depend on what comes after it? At every layer, in value and in gradient (R24, R41)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from isoform.verify.audit.leaks import Leaks, gradient_leaks, search_leaks
from isoform.verify.audit.report import Check
from isoform.verify.subject import Subject

Promise = Literal["causal", "prefix", "bidirectional"]


def after(subject: Subject) -> Callable[[int], Tensor]:
    """Real places before a key: under a triangle none may depend on it; what padding reads is nobody's."""
    real = subject.real(subject.target)

    def forbidden(key: int) -> Tensor:
        return (torch.arange(real.shape[1]) < key) & real

    return forbidden


def promised(subject: Subject) -> tuple[Promise | None, str]:
    """What the module claims to be, and from what that was read."""
    module = subject.module
    config: Any = getattr(module, "config", None)
    stack: Any = getattr(config, "decoder", None)
    if hasattr(stack, "visibility"):
        if stack.visibility == "prefix":
            return "prefix", "config.decoder.visibility"
        return "causal", "the configuration: a decoder predicts each token from those before it"
    if getattr(config, "encoder", None) is not None and hasattr(config.encoder, "visibility"):
        return "bidirectional", "config.encoder.visibility"
    if subject.prefix() is not None:
        return "prefix", "the prefix lengths among the inputs"
    name = type(module).__name__
    if isinstance(module, nn.TransformerEncoder | nn.TransformerEncoderLayer):
        asked = subject.kwargs.get("is_causal") or _is_triangle(
            subject.kwargs.get("mask", subject.kwargs.get("src_mask"))
        )
        return ("causal", "the mask passed in") if asked else ("bidirectional", name)
    if isinstance(module, nn.TransformerDecoder | nn.TransformerDecoderLayer | nn.Transformer):
        asked = subject.kwargs.get("tgt_is_causal") or _is_triangle(subject.kwargs.get("tgt_mask"))
        return ("causal", "the mask passed in") if asked else (None, "no tgt_mask was passed in")
    if getattr(config, "attn_type", None) in ("uni", "bi"):
        return ("causal" if config.attn_type == "uni" else "bidirectional"), "config.attn_type"
    if getattr(config, "is_encoder_decoder", False) is True or getattr(config, "is_decoder", False) is True:
        return "causal", "config.is_decoder or is_encoder_decoder"
    if re.search(r"causal|lmhead|gpt|decoder|llama|generat", name, re.IGNORECASE):
        return "causal", f"the class name {name}"
    if re.search(r"encoder|bert|classif|masked|embed", name, re.IGNORECASE):
        return "bidirectional", f"the class name {name}"
    return None, "nothing says whether it is a decoder"


def _is_triangle(mask: Any) -> bool:
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[0] != mask.shape[1]:
        return False
    hidden = mask if mask.dtype == torch.bool else mask < 0
    return bool(torch.equal(hidden, torch.ones_like(hidden).triu(1)))


def check_causality(subject: Subject, promise: Promise | None, *, seed: int = 0) -> Check:
    """No position changes when a later one does, at any module, in value and in gradient."""
    why = "asked for"
    if promise is None:
        promise, why = promised(subject)
    if subject.content(subject.target).shape[1] < 2:
        return Check("causality", None, "the input has one position; causality needs at least two")
    if promise == "bidirectional":
        return Check(
            "causality", None, f"promises to read both ways ({why}); pass promise='causal' to check anyway"
        )
    if promise == "prefix":
        return Check(
            "causality", None, "a prefix decoder reads its condition both ways; see the check 'prefix'"
        )
    forbidden = after(subject)
    return judge("causality", subject, forbidden, promise, why, seed)


def judge(
    name: str,
    subject: Subject,
    forbidden: Callable[[int], Tensor],
    promise: Promise | None,
    why: str,
    seed: int,
) -> Check:
    """Run both searches and put what they found into words."""
    changed = search_leaks(subject, forbidden, seed=seed)
    gradient = gradient_leaks(subject, forbidden, seed=seed)
    evidence: dict[str, Any] = {
        "promise": promise or "unknown",
        "read_from": why,
        **_evidence("changed", changed),
    }
    if gradient is not None:
        evidence |= _evidence("gradient", gradient)
    leak = changed.first or (gradient.first if gradient is not None else None)
    shows = "for these weights and inputs, which positions each module's output depends on"
    rest = "other inputs, other lengths, paths not taken here, and leaks in the data (labels fed as inputs)"
    if leak is None:
        tried = "by changed inputs and by gradient" if gradient is not None else "by changed inputs"
        pairs = f"none of {changed.pairs} forbidden (query, key) pairs is read"
        statement = f"{pairs}, {tried}, at {changed.modules} modules"
        return Check(name, True, statement, evidence, shows, rest)
    statement = (
        f"position {leak.query} reads position {leak.key} (counted from 0) at {leak.module}: "
        f"its output there moves by {leak.size:.3g}"
    )
    hidden = changed.found and all(found.module != "output" for found in changed.found)
    if hidden:
        statement += "; the final output does not show it"
    if promise is None and changed.leaking == changed.pairs:
        note = (
            f"every position reads every other ({why}); pass promise='causal' if it is meant to be a decoder"
        )
        return Check(name, None, note, evidence, shows, rest)
    return Check(name, False, statement, evidence, shows, rest)


def _evidence(how: str, leaks: Leaks) -> dict[str, Any]:
    return {
        f"{how}_pairs": leaks.pairs,
        f"{how}_leaking": leaks.leaking,
        f"{how}_modules": leaks.modules,
        f"{how}_leaks": [dataclasses.asdict(leak) for leak in leaks.found[:8]],
    }
