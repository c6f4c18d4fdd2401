"""Any `torch.nn.Module` seen as a Transformer: which inputs are content, which are masks, and what comes out.

Knows three conventions by their argument names (Isoform's `Tokens`, Hugging Face's ``input_ids`` /
``attention_mask``, `torch.nn.Transformer`'s ``src`` / ``src_key_padding_mask``) and otherwise takes the first
``[B, T]`` integers or ``[B, T, d]`` floats for the content.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from isoform.errors import ShapeError
from isoform.tokens import Tokens

Inputs = Mapping[str, Any] | Sequence[Any] | Tensor | Tokens
MaskTruth = Literal["real", "padding"]

# Where each convention keeps the padding mask of a content argument, and what True (or 1) means there.
_MASKS: dict[str, tuple[str, MaskTruth]] = {
    "input_ids": ("attention_mask", "real"),
    "inputs_embeds": ("attention_mask", "real"),
    "decoder_input_ids": ("decoder_attention_mask", "real"),
    "decoder_inputs_embeds": ("decoder_attention_mask", "real"),
    "encoder_hidden_states": ("encoder_attention_mask", "real"),
    "src": ("src_key_padding_mask", "padding"),
    "tgt": ("tgt_key_padding_mask", "padding"),
    "memory": ("memory_key_padding_mask", "padding"),
}
_SOURCES = ("source", "src", "memory", "encoder_hidden_states", "source_ids", "context")
_GENERIC_MASKS: tuple[tuple[str, MaskTruth], ...] = (
    ("attention_mask", "real"),
    ("padding_mask", "padding"),
    ("key_padding_mask", "padding"),
    ("pad_mask", "padding"),
    ("src_key_padding_mask", "padding"),
    ("real", "real"),
    ("mask", "real"),
)


@dataclasses.dataclass(frozen=True)
class Stream:
    """One sequence that a module reads.

    Args:
        name: the argument that holds it.
        role: "target" for the stream whose positions the output has, else "source".
        mask: the argument of its padding mask; None: the module takes none.
        truth: what True means in that mask.
    """

    name: str
    role: Literal["target", "source"]
    mask: str | None
    truth: MaskTruth


@dataclasses.dataclass(frozen=True, eq=False)
class Seen:
    """One module's output in one run."""

    path: str
    value: Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """One forward pass: what every submodule returned, in order, and the module's own result."""

    seen: tuple[Seen, ...]
    output: Tensor
    result: Any

    def find(self, path: str) -> Tensor:
        """The last value seen at a path."""
        return next(s.value for s in reversed(self.seen) if s.path == path)


class Subject:
    """A module with example inputs."""

    def __init__(self, module: nn.Module, inputs: Inputs) -> None:
        self.module = module
        self.parameters = dict(inspect.signature(module.forward).parameters)
        self.kwargs = _bind(module, inputs)
        self.batch_first = _batch_first(module)
        self.streams = self._find_streams()

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

    def with_content(
        self, stream: Stream, content: Tensor, real: Tensor | None, kwargs: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The inputs with another content, and with another padding where the module takes a mask.

        ``real`` None removes the mask. Other per-row arguments keep their rows only if the batch is the same.
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
            if real is not None:
                example = self.kwargs.get(stream.mask)
                mask = real if stream.truth == "real" else ~real
                integral = stream.truth == "real" if example is None else example.dtype != torch.bool
                new[stream.mask] = mask.long() if integral else mask
        return new

    def rows(self, rows: Tensor) -> dict[str, Any]:
        """The inputs with only the given rows of the batch, in that order."""
        batch = self.content(self.target).shape[0]
        picked: dict[str, Any] = {}
        for name, value in self.kwargs.items():
            if isinstance(value, Tokens):
                picked[name] = value.select(rows)
            elif isinstance(value, Tensor) and value.dim() >= 1:
                axis = 0 if self.batch_first or value.dim() < 3 else 1
                matches = value.shape[axis] == batch and not (
                    value.dim() == 2 and name in ("mask", "tgt_mask")
                )
                picked[name] = value.index_select(axis, rows) if matches else value
            else:
                picked[name] = value
        return picked

    def run(self, kwargs: Mapping[str, Any] | None = None, *, grad: bool = False) -> Run:
        """Run the module as it is, keeping every submodule's output."""
        seen: list[Seen] = []
        with torch.set_grad_enabled(grad), watching(self.module, seen):
            result = self.module(**(self.kwargs if kwargs is None else kwargs))
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
        found = [s for s in (_batch_time(x, batch, length) for x in run.seen) if s is not None]
        last = _batch_time(Seen("output", run.output), batch, length)
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

    def _find_streams(self) -> tuple[Stream, ...]:
        kwargs, found = self.kwargs, []
        for name, value in kwargs.items():
            if isinstance(value, Tokens):
                found.append(Stream(name, "source" if name in _SOURCES else "target", name, "real"))
            elif isinstance(value, Tensor) and (name in _MASKS or self._reads(name, value, bool(found))):
                mask, truth = _MASKS.get(name, (None, "real"))
                if mask is None or mask not in self.parameters:
                    mask, truth = self._generic_mask(name)
                found.append(Stream(name, "source" if name in _SOURCES else "target", mask, truth))
        if not found:
            raise ShapeError(
                f"{type(self.module).__name__}: no input looks like token ids [B, T] or vectors [B, T, d]"
            )
        targets = [s for s in found if s.role == "target"]
        if any(s.name.startswith("decoder_") for s in targets):
            found = [
                dataclasses.replace(s, role="target" if s.name.startswith("decoder_") else "source")
                for s in found
            ]
        elif not targets:
            found = [dataclasses.replace(found[0], role="target"), *found[1:]]
        elif len(targets) > 1:
            found = [dataclasses.replace(s, role="target" if s is targets[0] else "source") for s in found]
        return tuple(found)

    def _reads(self, name: str, value: Tensor, more: bool) -> bool:
        """Whether an argument of no known name holds content: the first that can, and further token ids."""
        if not _is_content(value):
            return False
        word = name.lower()
        other = any(part in word for part in ("mask", "type", "segment", "position", "label", "real", "pad"))
        return not more or (not value.is_floating_point() and not other)

    def _generic_mask(self, name: str) -> tuple[str | None, MaskTruth]:
        for mask in (f"{name}_{word}" for word in ("mask", "padding_mask", "key_padding_mask", "real")):
            given = self.kwargs.get(mask)
            if isinstance(given, Tensor) and given.shape == self.content_shape(name):
                return mask, _truth(given, "padding" if "padding" in mask else "real")
        for mask, truth in _GENERIC_MASKS:
            given = self.kwargs.get(mask)
            if mask in self.parameters and (
                given is None or (isinstance(given, Tensor) and given.dim() == 2)
            ):
                square = isinstance(given, Tensor) and given.shape != self.content_shape(name)
                if not square:
                    return mask, truth
        return None, "real"

    def content_shape(self, name: str) -> torch.Size:
        """``[B, T]`` of an argument."""
        value = self.kwargs[name]
        shape = value.shape[:2]
        return shape if self.batch_first or value.dim() < 3 else torch.Size((shape[1], shape[0]))


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


def main_tensor(result: Any) -> Tensor:
    """The tensor a module's result is about: logits, else the last hidden state, else the first tensor."""
    if isinstance(result, Tensor):
        return result
    for name in ("logits", "prediction_logits", "last_hidden_state", "hidden", "pooled"):
        value = result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)
        if isinstance(value, Tensor):
            return value
    values = list(result.values()) if isinstance(result, Mapping) else result
    if isinstance(values, tuple | list):
        for value in values:
            if isinstance(value, Tensor) and value.dim() >= 2:
                return value
    raise ShapeError(f"a forward pass returned {type(result).__name__}, which holds no tensor to look at")


@contextmanager
def watching(module: nn.Module, seen: list[Seen]) -> Generator[None]:
    """Append every submodule's floating-point output to ``seen`` while the block runs."""

    def listen(path: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            value = output
            if not isinstance(output, Tensor):
                try:
                    value = main_tensor(output)
                except (ShapeError, TypeError):
                    return
            if value.is_floating_point() and not value.is_nested:
                seen.append(Seen(path, value))

        return hook

    handles = [m.register_forward_hook(listen(path)) for path, m in module.named_modules() if path]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def mode(module: nn.Module, *, training: bool) -> Generator[None]:
    """Put a module and all its parts in training or evaluation mode, and back to how each was."""
    before = {m: m.training for m in module.modules()}
    module.train(training)
    try:
        yield
    finally:
        for m, flag in before.items():
            m.training = flag


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


def _is_content(value: Tensor) -> bool:
    if value.dtype == torch.bool:
        return False
    return value.dim() == 3 if value.is_floating_point() else value.dim() == 2


def _batch_time(seen: Seen, batch: int, length: int) -> Seen | None:
    value = seen.value
    if value.dim() >= 3 and value.shape[0] == batch and value.shape[1] == length:
        return seen
    if value.dim() >= 3 and value.shape[0] == length and value.shape[1] == batch:
        return Seen(seen.path, value.transpose(0, 1))
    if value.dim() >= 4 and value.shape[0] == batch and value.shape[2] == length:
        return Seen(seen.path, value.transpose(1, 2))
    if value.dim() == 2 and value.shape[0] == batch * length and length > 1:
        return Seen(seen.path, value.view(batch, length, -1))
    return None


def _truth(mask: Tensor, default: MaskTruth) -> MaskTruth:
    """What True means in a mask: padding is never in the first column of all rows and in the last one too."""
    edges = mask.bool()[:, [0, -1]]
    if bool(edges.all(0).any()) and not bool((~edges).all(0).any()):
        return "real"
    if bool((~edges).all(0).any()) and not bool(edges.all(0).any()):
        return "padding"
    return default


def _like(where: Tensor, content: Tensor) -> Tensor:
    return where if content.dim() == 2 else where[..., None]
