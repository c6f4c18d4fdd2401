"""The parts of a step of one token a row ``[N, d]`` as plain calls; see `step`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isoform.nn.attention import Attention
from isoform.nn.embedding import Embedding
from isoform.nn.feed_forward import Gated, TwoLayer
from isoform.nn.heads import TokenHead
from isoform.nn.layer import Layer, ParallelLayer, Residual
from isoform.nn.linear import Linear, Packed, lookup
from isoform.nn.norms import Norm
from isoform.nn.reads import CrossRead, Map, Near, SelfRead


@dataclasses.dataclass(frozen=True, eq=False)
class At:
    """What one layer is given in one step."""

    near: Near
    new: tuple[Tensor, Tensor]
    keys: Tensor
    values: Tensor
    shared: tuple[Tensor, Tensor] | None
    memory: tuple[Tensor, Tensor] | None
    memory_added: Tensor | None


Run = Callable[[Tensor, At], Tensor]


def _map(module: nn.Module) -> Map:
    """An affine map without the module around it."""
    if not isinstance(module, Linear | Packed) or type(module) not in (Linear, Packed):
        return module
    if module.product is not None:
        return module.product
    turned, bias = module.weight.t(), module.full_bias() if isinstance(module, Packed) else module.bias
    return (lambda x: torch.mm(x, turned)) if bias is None else lambda x: torch.addmm(bias, x, turned)


def flat_norm(module: nn.Module) -> Map | None:
    """A norm; None: there is none."""
    if isinstance(module, nn.Identity):
        return None
    if not isinstance(module, Norm) or type(module) is not Norm:
        return module
    gain, bias, width, eps = module.weight, module.bias, module.width, module.cfg.eps
    if gain is not None and module.cfg.gain_offset:
        gain = gain + module.cfg.gain_offset
    if module.cfg.kind == "layer":
        return lambda x: torch.layer_norm(x, (width,), gain, bias, eps)

    def rms(x: Tensor) -> Tensor:
        # `torch.rms_norm` is ten operations on a CPU, most of them for types that are not met here.
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        x = x * size.square_().mul_(1.0 / width).add_(eps).rsqrt_()
        return x if gain is None else x.mul_(gain)

    return rms


def flat_embedding(module: Embedding) -> Callable[[Tensor, Tensor | None], Tensor]:
    """(ids ``[N]``, rows of the position table) → first states."""
    weight, types, norm = module.weight, module.token_types, flat_norm(module.norm)
    scale = (
        None if module.scale == 1.0 else torch.tensor(module.scale, dtype=weight.dtype, device=weight.device)
    )
    project = None if isinstance(module.projection, nn.Identity) else _map(module.projection)
    early, late = (project, None) if module.early else (None, project)

    def run(ids: Tensor, rows: Tensor | None) -> Tensor:
        x = lookup(ids, weight, "token id")
        x = x if scale is None else x * scale
        x = x if early is None else early(x)
        x = x if rows is None else x + rows
        x = x if types is None else x + types[0]
        x = x if norm is None else norm(x)
        return x if late is None else late(x)

    return run


def flat_head(module: TokenHead) -> Map:
    """Scores over the vocabulary."""
    weight, bias, scale, softcap = module.weight, module.bias, module.scale, module.cfg.softcap
    product = module.product
    transform = None if isinstance(module.transform, nn.Identity) else module.transform

    def run(x: Tensor) -> Tensor:
        x = x if transform is None else transform(x)
        x = x if scale == 1.0 else x * scale
        scores = F.linear(x, weight, bias) if product is None else product(x)
        return scores if softcap is None else torch.tanh(scores / softcap) * softcap

    return run


def _feed_forward(module: nn.Module) -> Map:
    if type(module) is TwoLayer:
        activation, up, down = module.activation, _map(module.up), _map(module.down)
        return lambda x: down(activation(up(x)))
    if type(module) is Gated:
        return _gated(module)
    return module


def _gated(module: Gated) -> Map:
    activation, both, down, width = (
        module.activation,
        _map(module.gate_up),
        _map(module.down),
        module.cfg.width,
    )

    def run(x: Tensor) -> Tensor:
        mixed = both(x)
        return down(activation(mixed.narrow(1, 0, width)) * mixed.narrow(1, width, width))

    return run


def flat_layer(block: nn.Module) -> Run | None:
    """A decoder layer; None where it is made of other modules than ours."""
    if type(block) is Layer:
        return _sequential(block)
    if type(block) is ParallelLayer and type(block.attention) is Attention:
        return _parallel(block)
    return None


def _self_read(module: Attention) -> SelfRead:
    norms = flat_norm(module.query_norm), flat_norm(module.key_norm)
    return SelfRead(module.cfg, _map(module.qkv), _map(module.output), norms)


def _sequential(block: Layer) -> Run | None:
    parts = [
        part for part in (block.attention, block.cross_attention, block.feed_forward) if part is not None
    ]
    if any(type(part) is not Residual for part in parts) or type(block.attention.body) is not Attention:
        return None
    read, feed = _self_read(block.attention.body), _feed_forward(block.feed_forward.body)
    (before, after), (before_feed, after_feed) = _residual(block.attention), _residual(block.feed_forward)
    crossing = None
    if block.cross_attention is not None:
        body = block.cross_attention.body
        if type(body) is not Attention:
            return None
        reads = CrossRead(body.cfg, _map(body.query), _map(body.output), flat_norm(body.query_norm))
        crossing = (reads, *_residual(block.cross_attention))

    def run(x: Tensor, at: At) -> Tensor:
        inner = x if before is None else before(x)
        x = after(x, inner, read(inner, at.near, at.new, at.keys, at.values, at.shared))
        if crossing is not None and at.memory is not None:
            cross, before_cross, after_cross = crossing
            inner = x if before_cross is None else before_cross(x)
            x = after_cross(x, inner, cross(inner, at.memory, at.memory_added, at.near.outputs))
        inner = x if before_feed is None else before_feed(x)
        return after_feed(x, inner, feed(inner))

    return run


def _residual(module: Residual) -> tuple[Map | None, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """What comes before the body, and what comes after it: (stream, body's input, body's output) → stream."""
    middle, end = flat_norm(module.after_body), flat_norm(module.after_sum)
    scale, normalised = module.scale, module.from_normalised

    def after(x: Tensor, inner: Tensor, increment: Tensor) -> Tensor:
        increment = increment if middle is None else middle(increment)
        increment = increment if scale == 1.0 else increment * scale
        total = (inner if normalised else x) + increment
        return total if end is None else end(total)

    return flat_norm(module.before), after


def _parallel(block: ParallelLayer) -> Run:
    read, feed = _self_read(block.attention), _feed_forward(block.feed_forward)
    norm, other = (
        flat_norm(block.attention_norm),
        None if block.shared else flat_norm(block.feed_forward_norm),
    )
    shared, scale = block.shared, block.scale

    def run(x: Tensor, at: At) -> Tensor:
        inner = x if norm is None else norm(x)
        increment = read(inner, at.near, at.new, at.keys, at.values, at.shared)
        if not shared:
            inner = x if other is None else other(x)
        increment = increment + feed(inner)
        return x + (increment if scale == 1.0 else increment * scale)

    return run
