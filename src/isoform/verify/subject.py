"""Any `torch.nn.Module` seen as a Transformer: its inputs, changed at will, and what comes out."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from isoform.errors import ShapeError
from isoform.tokens import Tokens
from isoform.verify.inline import listening
from isoform.verify.streams import DOCUMENTS, PREFIXES, Stream, find_streams
from isoform.verify.watching import Run, Seen, batch_time, main_tensor, mode, watching

__all__ = [
    "Inputs",
    "Run",
    "Seen",
    "Stream",
    "Subject",
    "main_tensor",
    "mode",
    "other_content",
    "vocabulary_size",
    "watching",
]

Inputs = Mapping[str, Any] | Sequence[Any] | Tensor | Tokens


class Subject:
    """A module with example inputs."""

    def __init__(self, module: nn.Module, inputs: Inputs) -> None:
        self.module = module
        self.parameters = dict(inspect.signature(module.forward).parameters)
        self.kwargs = _bind(module, inputs)
        self.batch_first = _batch_first(module)
        self.streams = find_streams(module, self.kwargs, self.parameters, self.batch_first)

    @property
    def target(self) -> Stream:
        """The stream whose positions the output has."""
        return next(s for s in self.streams if s.role == "target")

    @property
    def source(self) -> Stream | None:
        """The other stream, if there is one."""
        return next((s for s in self.streams if s.role == "source"), None)

    def content(self, stream: Stream, kwargs: Mapping[str, Any] | None = None) -> Tensor:
        """Ids ``[B, T]`` or vectors ``[B, T, d]`` of a stream, batch first."""
        value = (self.kwargs if kwargs is None else kwargs)[stream.name]
        if isinstance(value, Tokens):
            return value.ids
        return value if self.batch_first or value.dim() < 3 else value.transpose(0, 1)

    def real(self, stream: Stream, kwargs: Mapping[str, Any] | None = None) -> Tensor:
        """``[B, T]`` True = a real token of the stream."""
        kwargs = self.kwargs if kwargs is None else kwargs
        value = kwargs[stream.name]
        if isinstance(value, Tokens):
            return value.real_or_ones()
        content = self.content(stream, kwargs)
        mask = kwargs.get(stream.mask) if stream.mask else None
        if mask is None or mask.dim() != 2:
            return torch.ones(content.shape[:2], dtype=torch.bool, device=content.device)
        return mask.bool() if stream.truth == "real" else ~mask.bool()

    def documents(self) -> Tensor | None:
        """``[B, T]`` numbers of the packed documents that go with the target."""
        value = self.kwargs.get(self.target.name)
        if isinstance(value, Tokens):
            return value.documents
        shape = self.content(self.target).shape[:2]
        given = (self.kwargs.get(name) for name in DOCUMENTS)
        return next((x for x in given if isinstance(x, Tensor) and x.shape == shape), None)

    def prefix(self) -> Tensor | None:
        """``[B]`` lengths of the condition that goes in front of the target."""
        value = self.kwargs.get(self.target.name)
        if isinstance(value, Tokens):
            return value.prefix
        batch = self.content(self.target).shape[:1]
        given = (self.kwargs.get(name) for name in PREFIXES)
        found = next((x for x in given if isinstance(x, Tensor | int)), None)
        return None if found is None else torch.as_tensor(found).expand(batch)

    def with_content(
        self, stream: Stream, content: Tensor, real: Tensor | None, kwargs: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The inputs with another content, and with another padding where the module takes a mask.

        ``real`` None removes the mask, or makes all real where the module must have one. Other per-row
        arguments keep their rows only if the batch is the same.
        """
        new = dict(self.kwargs if kwargs is None else kwargs)
        old = new[stream.name]
        if isinstance(old, Tokens):
            same = content.shape[:2] == old.ids.shape
            new[stream.name] = Tokens(
                content,
                real,
                old.documents if same else None,
                old.prefix if content.shape[0] == old.batch else None,
                old.token_types if same else None,
            )
            return new
        new[stream.name] = content if self.batch_first or content.dim() < 3 else content.transpose(0, 1)
        if stream.mask is not None:
            new.pop(stream.mask, None)
            taken = self.parameters.get(stream.mask)
            if real is None and taken is not None and taken.default is taken.empty:
                real = torch.ones(content.shape[:2], dtype=torch.bool, device=content.device)
            if real is not None:
                example = self.kwargs.get(stream.mask)
                mask = real if stream.truth == "real" else ~real
                # ``attention_mask`` is a table of 0 and 1 by custom; other names hold booleans.
                counted = "attention_mask" in stream.mask
                integral = counted if example is None else example.dtype != torch.bool
                new[stream.mask] = mask.long() if integral else mask
        return new

    def rows(self, rows: Tensor) -> dict[str, Any]:
        """The inputs with only the given rows of the batch, in that order."""
        batch = self.content(self.target).shape[0]
        lengths = [self.content(stream).shape[1] for stream in self.streams]
        padding = [stream.mask for stream in self.streams]
        picked: dict[str, Any] = {}
        for name, value in self.kwargs.items():
            if isinstance(value, Tokens):
                picked[name] = value.select(rows)
            elif isinstance(value, Tensor) and value.dim() >= 1:
                axis = 0 if self.batch_first or value.dim() < 3 else 1
                # A mask over positions has none, though there may be as many positions as rows.
                square = value.dim() == 2 and all(size in lengths for size in value.shape)
                over_positions = square and "mask" in name and name not in padding
                matches = value.shape[axis] == batch and not over_positions
                picked[name] = value.index_select(axis, rows) if matches else value
            else:
                picked[name] = value
        return picked

    def given(self, kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The inputs as copies, for some modules write to what they are given (to positions, say)."""
        kwargs = self.kwargs if kwargs is None else kwargs
        return {name: v.clone() if isinstance(v, Tensor) else v for name, v in kwargs.items()}

    def run(self, kwargs: Mapping[str, Any] | None = None, *, grad: bool = False) -> Run:
        """Run the module as it is, keeping every submodule's output."""
        return self._run(kwargs, [], grad, contextlib.nullcontext())

    def run_inline(self, kwargs: Mapping[str, Any] | None = None) -> Run:
        """Likewise, also keeping what attention and sums give that are written between modules."""
        seen: list[Seen] = []
        batch, length = self.content(self.target).shape[:2]
        return self._run(kwargs, seen, False, listening(self.module, batch, length, seen))

    def _run(
        self,
        kwargs: Mapping[str, Any] | None,
        seen: list[Seen],
        grad: bool,
        around: AbstractContextManager[None],
    ) -> Run:
        with torch.set_grad_enabled(grad), watching(self.module, seen), around:
            result = self.module(**self.given(kwargs))
        return Run(tuple(seen), self.batch_major(main_tensor(result)), result)

    def batch_major(self, value: Tensor) -> Tensor:
        """Batch axis first."""
        return value if self.batch_first or value.dim() < 3 else value.transpose(0, 1)

    def at_real(self, value: Tensor, rows: Tensor | None = None) -> Tensor:
        """The entries of an output at real positions; what a module leaves at padding does not matter."""
        real = self.real(self.target)
        real = real if rows is None else real[rows]
        return value[real] if value.dim() >= 3 and value.shape[:2] == real.shape else value

    def timed(self, run: Run, batch: int, length: int) -> list[Seen]:
        """What was seen with a batch and a time axis, brought to ``[B, T, …]``, the result last."""
        found = [s for s in (batch_time(x, batch, length) for x in run.seen) if s is not None]
        last = batch_time(Seen("output", run.output), batch, length)
        return [*found, last] if last is not None else found

    def put(self, stream: Stream, content: Tensor) -> dict[str, Any]:
        """The inputs with another content of the same shape, everything else as it is."""
        value = self.kwargs[stream.name]
        if isinstance(value, Tokens):
            return {**self.kwargs, stream.name: dataclasses.replace(value, ids=content)}
        return {
            **self.kwargs,
            stream.name: content if self.batch_first or content.dim() < 3 else content.transpose(0, 1),
        }

    def swap(self, stream: Stream, where: Tensor, generator: torch.Generator) -> dict[str, Any]:
        """The inputs with the content at ``where [B, T]`` exchanged for something else that is valid."""
        content = self.content(stream)
        return self.put(
            stream, torch.where(_like(where, content), other_content(self, content, generator), content)
        )


def other_content(subject: Subject, content: Tensor, generator: torch.Generator) -> Tensor:
    """Random content of the same kind that differs at every place from what is there."""
    if content.is_floating_point():
        noise = torch.randn(content.shape, generator=generator, dtype=torch.float64)
        return content + noise.to(content) * content.std().clamp(min=1.0)
    size = max(vocabulary_size(subject.module), int(content.max()) + 1, 2)
    shift = torch.randint(1, size, content.shape, generator=generator)
    return (content + shift.to(content.device)) % size


def vocabulary_size(module: nn.Module) -> int:
    """Rows of the smallest table that could be the token embedding: ids below this are valid everywhere."""
    sizes = [
        m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding) and m.num_embeddings > 4
    ]
    config = getattr(module, "config", None)
    declared = getattr(config, "vocab_size", None)
    if isinstance(declared, int):
        return declared
    embedding = getattr(config, "embedding", None)
    if embedding is not None:
        source = getattr(config, "source", None)
        return min(embedding.vocab_size, source.vocab_size) if source is not None else embedding.vocab_size
    # Token ids index the first table that is registered; position tables usually come after it.
    return sizes[0] if sizes else 2


def _bind(module: nn.Module, inputs: Inputs) -> dict[str, Any]:
    if isinstance(inputs, Mapping):
        return dict(inputs)
    values = (inputs,) if isinstance(inputs, Tensor | Tokens) else tuple(inputs)
    names = list(inspect.signature(module.forward).parameters)
    if len(values) > len(names):
        raise ShapeError(
            f"{type(module).__name__}.forward takes {len(names)} arguments, {len(values)} inputs given"
        )
    return dict(zip(names, values, strict=False))


def _batch_first(module: nn.Module) -> bool:
    flags = [m.batch_first for m in module.modules() if isinstance(m, nn.MultiheadAttention)]
    plain = isinstance(module, nn.Transformer | nn.TransformerEncoder | nn.TransformerDecoder)
    plain = plain or isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer)
    return not plain or not flags or flags[0]


def _like(where: Tensor, content: Tensor) -> Tensor:
    return where if content.dim() == 2 else where[..., None]
