"""The same inputs with more positions and with padding: short inputs hide windows, offsets, buckets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from isoform.errors import IsoformError
from isoform.verify.inner_padding import lengths_of, real_tokens
from isoform.verify.record import Recording, record
from isoform.verify.subject import Inputs, Subject, vocabulary_size

LONGER = 12
"""Positions that are added where inputs can be made longer."""


def longer(
    first: nn.Module, second: nn.Module, inputs: Inputs, other: Inputs
) -> tuple[Recording, Recording] | None:
    """Record both with more positions, and with padding where a mask has none; None: not possible."""
    try:
        given = [_extended(Subject(m, i)) for m, i in ((first, inputs), (second, other))]
        if given[0] is None or given[1] is None:
            return None
        return record(first, given[0]), record(second, given[1])
    except (IsoformError, RuntimeError, IndexError, ValueError, TypeError):
        return None


def _extended(subject: Subject) -> dict[str, Any] | None:
    kwargs = dict(subject.kwargs)
    for number, stream in enumerate(subject.streams):
        value = kwargs[stream.name]
        if not isinstance(value, Tensor) or value.dim() != 2 or value.is_floating_point():
            return None
        real, lengths = real_tokens(subject, stream), lengths_of(subject, stream)
        if lengths is not None:
            kwargs[lengths] = kwargs[lengths] + LONGER
        left = bool((~real[:, 0]).any())
        generator = torch.Generator().manual_seed(20 + number)
        size = max(vocabulary_size(subject.module), int(value.max()) + 1)
        size = min(size, int(value[real].max()) + 1)  # ids that are known to be valid
        fresh = torch.randint(0, size, (len(value), LONGER), generator=generator).to(value)
        low = int(value[real].min())
        fresh = fresh.clamp(min=low)
        kwargs[stream.name] = torch.cat([value, fresh] if left else [fresh, value], 1)
        mask = kwargs.get(stream.mask) if stream.mask else None
        if isinstance(mask, Tensor):
            if mask.shape != value.shape:
                return None
            truth = stream.truth == "real"
            more = torch.full(fresh.shape, truth).to(mask)
            new = torch.cat([mask, more] if left else [more, mask], 1)
            if bool(real.all()) and len(value) > 1 and value.shape[1] > 2:
                new[-1, -2:] = not truth
            kwargs[str(stream.mask)] = new
    for name, value in kwargs.items():
        known = {s.name for s in subject.streams} | {s.mask for s in subject.streams}
        if isinstance(value, Tensor) and name not in known and value.dim() >= 2:
            return None
    return kwargs
