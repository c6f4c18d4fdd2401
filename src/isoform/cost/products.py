"""Every matrix product of a step, with its operands' sizes: what FLOPs and traffic are reckoned from."""

from __future__ import annotations

import dataclasses

from isoform.config import (
    Attention,
    Embedding,
    Experts,
    FeedForward,
    Gated,
    Head,
    Layer,
    ModelConfig,
    PoolingHead,
    Stack,
    TaggingHead,
    TokenHead,
)
from isoform.cost.component import Sizes
from isoform.cost.formula import Formula, constant, symbol
from isoform.cost.groups import layer_groups
from isoform.cost.parameters import attention_widths
from isoform.cost.workload import Workload, visible_pairs

B, D, NOTHING = symbol("B"), symbol("d"), constant(0)


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product, occurring ``uses`` times in one forward pass.

    Attributes:
        name: dotted, after the component whose weights it uses.
        multiply_adds: closed form of one occurrence over the whole batch.
        visible: the same over the (query, key) pairs that the visibility allows; equal outside attention.
        weights: elements of the weight matrix it reads; nothing between activations.
        activations: elements it reads and writes beside the weights.
        cached: elements of ``activations`` that come from the key-value cache.
        sizes: the value of every symbol.
        uses: occurrences in the forward pass.
        in_layer: whether layer recomputation runs it a second time.
    """

    name: str
    multiply_adds: Formula
    visible: Formula
    weights: Formula
    activations: Formula
    cached: Formula
    sizes: Sizes
    uses: int = 1
    in_layer: bool = False


@dataclasses.dataclass(frozen=True)
class _Stream:
    """How long the sequence is that a stack runs over: the symbol it is written with, and its length."""

    queries: Formula
    keys: Formula
    sizes: dict[str, int]
    pairs: int  # visible, of one row
    decode: bool


def products(config: ModelConfig, work: Workload) -> list[Product]:
    """The products of one forward pass of this work, in the order data passes them.

    Prefill computes logits at the last position only, since the others choose no token; an encoder's head
    reads all of them. In decode the encoder and the memory's keys and values are already there.
    """
    found: list[Product] = []
    base = {"B": work.rows, "d": config.d_model}
    if work.source_length is not None:
        base["S"] = work.source_length
    decode = work.mode == "decode"
    own = symbol("T")
    if config.source is not None and not decode:
        found += _projection("source", config.source, symbol("S"), base)
    sizes = {**base, "T": 1 if decode else work.length}
    found += _projection("embedding", config.embedding, own, sizes)
    if config.encoder is not None and not decode:
        source = config.source is not None
        at = symbol("S") if source else own
        found += _stack("encoder", config.encoder, config.d_model, at, base if source else sizes, work)
    if config.decoder is not None:
        found += _stack("decoder", config.decoder, config.d_model, own, sizes, work)
    if config.head is not None:
        last = work.mode == "prefill" and config.decoder is not None
        found += _head(config.head, config, constant(1) if last else own, sizes)
    return found


def _linear(name: str, rows: Formula, inputs: Formula, outputs: Formula, sizes: Sizes) -> Product:
    work = B * rows * inputs * outputs
    moved = B * rows * (inputs + outputs)
    return Product(name, work, work, inputs * outputs, moved, NOTHING, sizes)


def _projection(name: str, table: Embedding, rows: Formula, sizes: Sizes) -> list[Product]:
    if table.projection is None:
        return []
    return [_linear(f"{name}.projection", rows, symbol("w"), D, {**sizes, "w": table.width})]


def _stack(
    name: str, stack: Stack, d_model: int, rows: Formula, sizes: dict[str, int], work: Workload
) -> list[Product]:
    found: list[Product] = []
    for group in layer_groups(stack):
        layer = _layer(group.layer, stack, name == "encoder", d_model, rows, sizes, work)
        found += [
            dataclasses.replace(
                p, name=f"{name}.{group.name}.{p.name}", uses=len(group.indices), in_layer=True
            )
            for p in layer
        ]
    return found


def _layer(
    layer: Layer,
    stack: Stack,
    encoder: bool,
    d_model: int,
    rows: Formula,
    sizes: dict[str, int],
    work: Workload,
) -> list[Product]:
    own, length, window = layer.attention, sizes["S" if rows == symbol("S") else "T"], layer.attention.window
    if work.mode == "decode":
        keys, sizes = symbol("K"), {**sizes, "K": work.length}
        pairs = min(work.length, window or work.length)
    else:
        keys = rows
        pairs = visible_pairs(stack, window, length, 0 if encoder else work.prefix_length)
    stream = _Stream(rows, keys, sizes, pairs, work.mode == "decode")
    found = _attention("attention", own, d_model, stream, memory=False)
    if layer.cross_attention is not None:
        pairs = sizes["T"] * sizes["S"]
        across = _Stream(rows, symbol("S"), sizes, pairs, work.mode == "decode")
        found += _attention("cross_attention", layer.cross_attention, d_model, across, memory=True)
    return found + _feed_forward("feed_forward", layer.feed_forward, d_model, rows, sizes)


def _attention(
    name: str, attention: Attention, d_model: int, stream: _Stream, *, memory: bool
) -> list[Product]:
    q, kv, widths = attention_widths(attention, d_model)
    sizes = {**stream.sizes, **widths, "h": attention.n_heads, "A": stream.pairs}
    rows, keys = stream.queries, stream.keys
    found = [_linear(f"{name}.query", rows, D, q, sizes)]
    if not (memory and stream.decode):  # the memory's keys and values are made once, in prefill
        found += [
            _linear(f"{name}.{side}", keys if memory else rows, D, kv, sizes) for side in ("key", "value")
        ]
    # Scores and reading: h products of T × d_h with d_h × K. Fused kernels write the weights nowhere.
    every, seen = B * rows * keys * q, B * symbol("A") * q
    read = B * keys * kv
    cached = read if stream.decode else NOTHING
    found += [
        Product(f"{name}.{part}", every, seen, NOTHING, B * rows * q + read, cached, sizes)
        for part in ("scores", "read")
    ]
    return [*found, _linear(f"{name}.output", rows, q, D, sizes)]


def _feed_forward(
    name: str, network: FeedForward, d_model: int, rows: Formula, sizes: dict[str, int]
) -> list[Product]:
    if isinstance(network, Experts):
        n, k = network.n_experts, network.top_k
        sizes = {**sizes, "E": n, "k": k}
        router = _linear(f"{name}.router", rows, D, symbol("E"), sizes)
        # Each token is one row for each of its k experts. The weights read are those of the experts that
        # some token chose: with even routing E(1 - (1 - k/E)^rows) of them.
        rows_value = sizes["B"] * rows.value(sizes)
        busy = round(n * (1 - (1 - k / n) ** rows_value))
        inner = _feed_forward(f"{name}.experts", network.expert, d_model, symbol("k") * rows, sizes)
        return [router, *(dataclasses.replace(p, weights=max(busy, k) * p.weights) for p in inner)]
    f = symbol("f")
    sizes = {**sizes, "f": network.width}
    entries = ("gate", "up") if isinstance(network, Gated) else ("up",)
    found = [_linear(f"{name}.{entry}", rows, D, f, sizes) for entry in entries]
    return [*found, _linear(f"{name}.down", rows, f, D, sizes)]


def _head(head: Head, config: ModelConfig, rows: Formula, sizes: dict[str, int]) -> list[Product]:
    table = config.embedding
    found: list[Product] = []
    if isinstance(head, TokenHead):
        sizes = {**sizes, "V": table.vocab_size, "w": table.width}
        width = D
        if head.transform is not None:
            width = D if table.width == config.d_model else symbol("w")
            found.append(_linear("head.transform", rows, D, width, sizes))
        return [*found, _linear("head", rows, width, symbol("V"), sizes)]
    dense, each = (head.dense, rows) if isinstance(head, TaggingHead) else (head.pooler, constant(1))
    if dense is not None:
        found.append(_linear("head.dense", each, D, D, sizes))
    if not isinstance(head, PoolingHead):
        found.append(_linear("head.labels", each, D, symbol("L"), {**sizes, "L": head.n_labels}))
    return found
