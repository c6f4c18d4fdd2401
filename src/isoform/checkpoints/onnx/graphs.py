"""What of a network becomes one ONNX graph: plain tensors in, plain tensors out.

The cache of these graphs grows by concatenation, as is usual for the format: slots hold the tokens in the
order they were given, padding included, and the mask over all of them says which are real. Places and
positions follow from the mask, so padding may be on either side, and between prompt and continuation.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from isoform.config import ModelConfig, PoolingHead, SequenceHead
from isoform.nn import Transformer
from isoform.nn.cache import Cache
from isoform.nn.stack import Sides
from isoform.places import Places
from isoform.tokens import Tokens

BATCH, LENGTH, PAST, TOTAL, SOURCE = "batch", "length", "past", "total", "source"


@dataclasses.dataclass(frozen=True)
class Port:
    """An input or output: its name, type, and axes, named where they are free."""

    name: str
    dtype: str
    axes: tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class Graph:
    """One graph to write.

    Attributes:
        file: its name.
        module: what is traced.
        inputs: in the order of the module's arguments.
        outputs: in the order of what it returns.
    """

    file: str
    module: nn.Module
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


def graphs(model: Transformer) -> list[Graph]:
    """One graph for an encoder or a decoder, two for an encoder–decoder."""
    cfg = model.config
    if cfg.structure == "encoder":
        return [_encoder(model)]
    if cfg.structure == "decoder":
        return [_decoder(model)]
    return [_source(model), _decoder(model)]


class Appended:
    """One layer's keys and values, new ones behind the old."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    def write(self, keys: Tensor, values: Tensor, slots: Tensor, start: int | None = None) -> None:
        """Put the new ones behind; where they would go in a cache of slots is not asked."""
        self.keys, self.values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)


def _places(mask: Tensor, prefix: Tensor | None = None) -> Places:
    real = mask != 0
    index = (real.long().cumsum(-1) - 1).clamp(min=0)
    return Places(index, real, None, prefix, "any")


def _head_outputs(cfg: ModelConfig) -> tuple[Port, ...]:
    head = cfg.head
    if head is None:
        return (Port("last_hidden_state", "float", (BATCH, LENGTH, cfg.d_model)),)
    if isinstance(head, PoolingHead):
        return (Port("pooled", "float", (BATCH, cfg.d_model)),)
    if isinstance(head, SequenceHead):
        return (Port("logits", "float", (BATCH, head.n_labels)),)
    width = cfg.embedding.vocab_size if head.kind == "tokens" else head.n_labels
    return (Port("logits", "float", (BATCH, LENGTH, width)),)


def _read(model: Transformer, hidden: Tensor, real: Tensor) -> Tensor:
    """What the head makes of the states."""
    head = model.head
    if head is None:
        return hidden
    if isinstance(model.config.head, PoolingHead | SequenceHead):
        found = head(hidden, real)
        return found if isinstance(found, Tensor) else found[1]
    return head(hidden)


class _Whole(nn.Module):
    """A single stack without a cache."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Any:
        model, places = self.model, _places(attention_mask)
        assert model.encoder is not None
        tokens = Tokens(input_ids, places.real, token_types=token_type_ids, layout="any")
        hidden = model.encoder(model.embedding(tokens, places.index), Sides(places, places, places.index))
        assert places.real is not None
        return _read(model, hidden, places.real)


class _Source(nn.Module):
    """The encoder of an encoder–decoder, and what its memory becomes in every decoder layer."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        model, places = self.model, _places(attention_mask)
        assert model.encoder is not None
        assert model.decoder is not None
        assert model.source_embedding is not None
        tokens = Tokens(input_ids, places.real, layout="any")
        x = model.source_embedding(tokens, places.index)
        memory = model.encoder(x, Sides(places, places, places.index))
        projected = [block.project_memory(memory) for block in model.decoder.blocks()]  # pyright: ignore
        return (memory, *(part for pair in projected for part in pair))


class _Step(nn.Module):
    """A decoder with its cache: a prompt when the cache is empty, any number of tokens after it."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model
        self.prefixed = model.config.stack.visibility == "prefix"

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        past: list[Tensor],
        source_mask: Tensor | None = None,
        memory: list[Tensor] | None = None,
        prefix: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        model = self.model
        assert model.decoder is not None
        key = _places(attention_mask, prefix)
        new = input_ids.shape[1]
        assert key.real is not None
        index, real = key.index[:, -new:], key.real[:, -new:]
        query = Places(index, real, None, prefix, "any")
        layers: Any = [Appended(k, v) for k, v in zip(past[::2], past[1::2], strict=True)]
        cache = Cache(layers, index[:, 0], prefix=prefix, fresh=False)
        if memory is not None:
            assert source_mask is not None
            cache.memory = list(zip(memory[::2], memory[1::2], strict=True))
            cache.memory_places = _places(source_mask)
        x = model.embedding(Tokens(input_ids, real, layout="any"), index)
        hidden = model.decoder(x, Sides(query, key, index, index), cache=cache)
        present = [part for layer in layers for part in (layer.keys, layer.values)]
        return (_read(model, hidden, real), *present)


def _ids(length: str) -> tuple[Port, Port]:
    return Port("input_ids", "int64", (BATCH, length)), Port("attention_mask", "int64", (BATCH, length))


def _encoder(model: Transformer) -> Graph:
    cfg = model.config
    inputs = _ids(LENGTH)
    if cfg.embedding.n_token_types:
        inputs = (*inputs, Port("token_type_ids", "int64", (BATCH, LENGTH)))
    return Graph("model.onnx", _Whole(model), inputs, _head_outputs(cfg))


def _source(model: Transformer) -> Graph:
    states = Port("memory", "float", (BATCH, SOURCE, model.config.d_model))
    return Graph("encoder.onnx", _Source(model), _ids(SOURCE), (states, *_memory(model.config)))


def _decoder(model: Transformer) -> Graph:
    cfg = model.config
    inputs = (
        Port("input_ids", "int64", (BATCH, LENGTH)),
        Port("attention_mask", "int64", (BATCH, TOTAL)),
        *_cached(cfg, "past", PAST),
    )
    if cfg.source is not None:
        inputs = (*inputs, Port("source_mask", "int64", (BATCH, SOURCE)), *_memory(cfg))
    if cfg.stack.visibility == "prefix":
        inputs = (*inputs, Port("prefix", "int64", (BATCH,)))
    file = "model.onnx" if cfg.source is None else "decoder.onnx"
    return Graph(file, _Step(model), inputs, (*_head_outputs(cfg), *_cached(cfg, "present", TOTAL)))


def _cached(cfg: ModelConfig, name: str, length: str) -> tuple[Port, ...]:
    heads = [layer.attention for layer in cfg.stack.layers()]
    return tuple(
        Port(f"{name}.{i}.{part}", "float", (BATCH, a.n_kv_heads, length, a.head_width))
        for i, a in enumerate(heads)
        for part in ("key", "value")
    )


def _memory(cfg: ModelConfig) -> tuple[Port, ...]:
    cross = [layer.cross_attention for layer in cfg.stack.layers()]
    return tuple(
        Port(f"memory.{i}.{part}", "float", (BATCH, a.n_kv_heads, SOURCE, a.head_width))
        for i, a in enumerate(cross)
        if a is not None
        for part in ("key", "value")
    )
