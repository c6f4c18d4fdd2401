"""Which tokens are real where a module takes no mask: by lengths, or by an id that only fills rows up."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from isoform.tokens import Tokens
from isoform.verify.recording import Recording
from isoform.verify.subject import Stream, Subject

_NAMES = ("pad", "pad_id", "pad_idx", "pad_token_id", "padding_idx", "pad_index", "padding_id")
"""Attributes, of modules or their ``config``, that hold the id of padding."""


def real_tokens(subject: Subject, stream: Stream) -> Tensor:
    """``[B, T]`` True = a real token of a stream, as far as the inputs and the module show it."""
    real = subject.real(stream)
    if not bool(real.all()) or isinstance(subject.kwargs[stream.name], Tokens):
        return real
    name = lengths_of(subject, stream)
    if name is not None:
        return torch.arange(real.shape[1], device=real.device) < subject.kwargs[name][:, None].to(real.device)
    ids = subject.content(stream)
    if ids.dim() != 2 or ids.is_floating_point():
        return real
    for pad in (*_known(subject.module), 0):
        if _fills_up(ids, pad):
            return ids != pad
    return real


def lengths_of(subject: Subject, stream: Stream) -> str | None:
    """The argument that holds the lengths of a stream's rows, if there is one."""
    batch, length = subject.content(stream).shape[:2]
    alone = len(subject.streams) == 1
    stem = stream.name.removesuffix("_ids").removesuffix("_tokens") + "_"
    for name, given in subject.kwargs.items():
        if not isinstance(given, Tensor) or given.shape != (batch,) or given.is_floating_point():
            continue
        named = "len" in name and "prefix" not in name and (alone or name.startswith(stem))
        if named and given.dtype != torch.bool and 0 < int(given.min()) <= int(given.max()) <= length:
            return name
    return None


def same_padding(first: Recording, second: Recording) -> tuple[Recording, Recording]:
    """Both, with one's padding also where the other's inputs show none."""
    both = [first, second]
    for role in [r for r in first.reals if r in second.reals]:
        reals = [r.inputs[r.reals[role]] for r in both]
        if reals[0].shape != reals[1].shape or bool(reals[0].all()) == bool(reals[1].all()):
            continue
        known = reals[int(bool(reals[0].all()))]
        both = [dataclasses.replace(r, inputs={**r.inputs, r.reals[role]: known}) for r in both]
    return both[0], both[1]


def _known(module: nn.Module) -> list[int]:
    found: list[int] = []
    for owner in (*module.modules(), getattr(module, "config", None)):
        held = (getattr(owner, name, None) for name in _NAMES)
        found += [v for v in held if isinstance(v, int) and not isinstance(v, bool) and v >= 0]
    return list(dict.fromkeys(found))


def _fills_up(ids: Tensor, pad: int) -> bool:
    """Whether an id stands at one side of rows alone, two or more times in one of them, and not in all."""
    if min(ids.shape) < 2:
        return False
    same = ids == pad
    for turned in (same, same.flip(1)):
        run = turned.flip(1).long().cumprod(1).sum(1)  # at the end of each row
        if int(same.sum()) == int(run.sum()) and int(run.min()) == 0 and 1 < int(run.max()) < ids.shape[1]:
            return True
    return False
