"""Does a model's own generation start, continue and end as its full pass says? (decode-protocol)"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isoform.tokens import Tokens
from isoform.verify.audit.report import Check
from isoform.verify.noise import tolerance
from isoform.verify.subject import Subject, main_tensor

NAME = "decode-protocol"
NEW = 6
"""Tokens that are generated."""

# Settings of Hugging Face's `generation_config` that change greedy choices in ways not followed here.
_FURTHER = {
    "num_beams": 1, "min_length": 0, "min_new_tokens": None, "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0, "bad_words_ids": None,
    "sequence_bias": None, "guidance_scale": None, "force_words_ids": None, "constraints": None,
    "exponential_decay_length_penalty": None, "num_beam_groups": 1, "penalty_alpha": None,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class _Own:
    """A model's own greedy generation of one row, and its full pass.

    Args:
        prompt: ids ``[n]`` that the output side starts with.
        new: ids that it generated, what ended it included.
        scores: ids ``[1, n]`` → logits ``[V]`` at the last one, by one full pass.
        rule: (logits ``[V]``, tokens so far) → logits by the model's settings.
        ends: ids that end an output.
    """

    prompt: Tensor
    new: list[int]
    scores: Callable[[Tensor], Tensor]
    rule: Callable[[Tensor, int], Tensor]
    ends: frozenset[int]


def check_decode_protocol(subject: Subject) -> Check:
    """Greedy generation by the model's own means chooses what full passes choose, from start to end."""
    from isoform.nn import Transformer

    if subject.content(subject.target).is_floating_point():
        return Check(NAME, None, "the input is not token ids")
    module, settings = subject.module, getattr(subject.module, "generation_config", None)
    theirs = settings is not None and callable(getattr(module, "generate", None))
    if isinstance(module, Transformer):
        if module.decoder is None or module.head is None:
            return Check(NAME, None, "it does not generate")
        own = _ours(subject)
    elif theirs:
        more = [n for n, plain in _FURTHER.items() if getattr(settings, n, plain) not in (plain, None)]
        if more:
            return Check(NAME, None, f"its generation_config sets {more[0]}, which is not followed here")
        own = _by_generate(subject, settings)
        start = _training_start(subject, own)
        if start is not None:
            return start
    else:
        return Check(NAME, None, "it has no generate of its own with a generation_config")
    return _compared(own)


def _compared(own: _Own) -> Check:
    shows = (
        "that start ids, positions of new tokens, forced and suppressed ids and ends are those of full passes"
    )
    rest = "sampling, beams, batches of prompts, and what text the ids stand for"
    ids, clear = own.prompt[None], 0
    evidence: dict[str, Any] = {"prompt": own.prompt.tolist(), "generated": own.new}
    for at, token in enumerate(own.new):
        scores = own.rule(own.scores(ids), at)
        best = scores.topk(2)
        if float(best.values[0] - best.values[1]) > 4 * tolerance(scores):
            clear += 1
            if int(best.indices[0]) != token:
                text = (
                    f"new token {at} is {token}, where the full pass scores {int(best.indices[0])} higher by "
                    f"{float(best.values[0] - scores[token]):.3g}"
                )
                return Check(NAME, False, text, {**evidence, "at": at, "expected": int(best.indices[0])})
        if token in own.ends and at + 1 < len(own.new):
            text = f"new token {at} is {token}, which ends an output, and {len(own.new) - at - 1} more follow"
            return Check(NAME, False, text, {**evidence, "at": at})
        ids = torch.cat([ids, ids.new_tensor([[token]])], 1)
    ended = bool(own.new) and own.new[-1] in own.ends
    if len(own.new) < NEW and not ended:
        text = f"it ends after {len(own.new)} of {NEW} tokens, with no id that ends an output"
        return Check(NAME, False, text, evidence)
    text = f"{clear} greedy choices, from {own.prompt.tolist()[-1]} on, are those of full passes"
    return Check(NAME, True, text, evidence, shows, rest)


def _ours(subject: Subject) -> _Own:
    from isoform.generation import generate

    model: Any = subject.module
    tokens: Tokens = subject.kwargs[subject.target.name].select(torch.tensor([0]))
    prompt = tokens.ids[0, tokens.real_or_ones()[0]]
    prompt = prompt[: max(1, len(prompt) // 2)]
    sources: dict[str, Any] = {}
    if subject.source is not None:
        sources["source"] = subject.kwargs[subject.source.name].select(torch.tensor([0]))
    prefix = None if tokens.prefix is None else tokens.prefix.clamp(max=len(prompt))

    def scores(ids: Tensor) -> Tensor:
        with torch.no_grad():
            return model(Tokens(ids, prefix=prefix), **sources).logits[0, -1]

    found = generate(
        model, Tokens(prompt[None], prefix=prefix), max_new_tokens=NEW, compile="never", **sources
    )
    return _Own(prompt, list(found.ids[0]), scores, lambda x, _: x, frozenset())


def _by_generate(subject: Subject, settings: Any) -> _Own:
    module: Any = subject.module
    both = bool(getattr(getattr(module, "config", None), "is_encoder_decoder", False))
    stream = subject.source if both and subject.source is not None else subject.target
    row = subject.content(stream)[0][subject.real(stream)[0]][None]
    row = row if both else row[:, : max(1, row.shape[1] // 2)]
    ends = getattr(settings, "eos_token_id", None)
    listed: list[int] = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    pad = getattr(settings, "pad_token_id", None)
    pads = {"pad_token_id": listed[0]} if pad is None and listed else {}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seen = torch.ones_like(row)
        found = module.generate(
            row, do_sample=False, num_beams=1, max_new_tokens=NEW, attention_mask=seen, **pads
        )
    size = 1 if both else row.shape[1]
    prompt, new = found[0, :size], found[0, size:].tolist()

    def scores(ids: Tensor) -> Tensor:
        read = {"input_ids": row, "decoder_input_ids": ids} if both else {"input_ids": ids}
        with torch.no_grad():
            return main_tensor(module(**read))[0, -1]

    def rule(x: Tensor, at: int) -> Tensor:
        x = x.clone()
        first, last = (
            getattr(settings, "forced_bos_token_id", None),
            getattr(settings, "forced_eos_token_id", None),
        )
        banned = list(getattr(settings, "suppress_tokens", None) or [])
        banned += list(getattr(settings, "begin_suppress_tokens", None) or []) if at == 0 else []
        x[[i for i in banned if i < len(x)]] = -torch.inf
        for forced, place in ((first, 0), (last, NEW - 1)):
            if forced is not None and at == place and (both or place):
                x[:] = -torch.inf
                x[forced if isinstance(forced, int) else forced[0]] = 0.0
        return x

    return _Own(prompt, new, scores, rule, frozenset(listed))


def _training_start(subject: Subject, own: _Own) -> Check | None:
    """Where the model shifts labels itself: the id in front of them is the one generation starts with."""
    module: Any = subject.module
    if "labels" not in subject.parameters or "decoder_input_ids" not in subject.parameters:
        return None
    source = subject.source
    if source is None:
        return None
    inputs = {source.name: subject.content(source)[:1]}
    labels = subject.content(subject.target)[:1].clone()
    labels[:, -1] = own.prompt[0]  # some put the last label first: a language, which generation starts with
    given = torch.cat([own.prompt[None, :1], labels[:, :-1]], 1)
    with torch.no_grad():
        shifted = main_tensor(module(**inputs, labels=labels))
        plain = main_tensor(module(**inputs, decoder_input_ids=given))
    if shifted.shape == plain.shape and float((shifted - plain).abs().max()) > 4 * tolerance(plain):
        text = (
            f"generation starts with {int(own.prompt[0])}, training on labels does not: first scores differ"
        )
        return Check(NAME, False, text, {"start": int(own.prompt[0])})
    return None
