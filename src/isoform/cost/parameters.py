"""Parameters in closed form, component by component (R26; 6.34, 6.35 and every other configuration)."""

from __future__ import annotations

import dataclasses
from typing import Any

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
    RelativeBuckets,
    SequenceHead,
    Stack,
    TaggingHead,
    TokenHead,
)
from isoform.cost.component import Component, Sizes, gather, leaf, linear, norm
from isoform.cost.formula import Formula, symbol
from isoform.cost.groups import layer_groups, stacks

D = symbol("d")


@dataclasses.dataclass(frozen=True)
class Parameters:
    """The parameters of a whole network.

    Attributes:
        root: the tree of components.
        total: all parameters; shared ones once (6.36).
        lookups: token tables, learned positions and token types. A table that a tied head multiplies by
            is counted here, not with the head.
        without_lookups: ``total - lookups``, the N of Kaplan et al. (2020) up to an untied head.
        active: parameters that take part in one token: all but the experts it isn't sent to.
        layers: parameters inside the layers, what (6.34) and (6.35) add up.
    """

    root: Component
    total: int
    lookups: int
    without_lookups: int
    active: int
    layers: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with stable keys."""
        return {
            "total": self.total,
            "lookups": self.lookups,
            "without_lookups": self.without_lookups,
            "active": self.active,
            "layers": self.layers,
            "components": [part.to_dict() for part in self.root.parts],
        }


def parameters(config: ModelConfig) -> Parameters:
    """Count a network's parameters from its configuration alone.

    The total equals ``sum(p.numel() for p in build(config).parameters())`` for every configuration.
    """
    parts = [_embedding("embedding", config.embedding, config.d_model, None)]
    if config.source is not None:
        tied = "embedding.table" if config.tie_source else None
        parts.append(_embedding("source", config.source, config.d_model, tied))
    for name, stack in stacks(config):
        parts.append(_stack(name, stack, config.d_model))
    if config.head is not None:
        parts.append(_head(config.head, config))
    root = Component("model", parts=tuple(parts))
    return Parameters(
        root=root,
        total=root.total,
        lookups=root.total_lookup,
        without_lookups=root.total - root.total_lookup,
        active=root.total_active,
        layers=sum(
            layer.total
            for name, _ in stacks(config)
            for stack in root.parts
            if stack.name == name
            for layer in stack.parts
            if layer.name.startswith("layers.")
        ),
    )


def layer_formula(layer: Layer, d_model: int) -> Formula:
    """The closed form of one layer: (6.34) and (6.35) for the chapter's two kinds."""
    formula = gather(layer_parts(layer, d_model)).formula
    assert formula is not None  # all parts of a layer are written in one set of symbols
    return formula


# --- components -------------------------------------------------------------------------------------------


def _embedding(name: str, table: Embedding, d_model: int, tied: str | None) -> Component:
    sizes = {"d": d_model, "V": table.vocab_size, "w": table.width, "P": 0, "N": table.n_token_types}
    width = D if table.width == d_model else symbol("w")
    # After a projection in front of the positions everything is d wide; else it is as wide as the table.
    inner = D if table.projection is not None and table.projection.place == "before_positions" else width
    parts = [leaf("table", symbol("V") * width, sizes, lookup=True, shared_with=tied)]
    if table.projection is not None:
        parts.append(linear("projection", width, D, table.projection.bias, sizes))
    if table.positions.kind == "learned":
        sizes["P"] = table.positions.max_positions + table.positions.offset
        parts.append(leaf("positions", symbol("P") * inner, sizes, lookup=True))
    if table.n_token_types:
        parts.append(leaf("token_types", symbol("N") * inner, sizes, lookup=True))
    if table.norm is not None:
        parts.append(norm("norm", table.norm, inner, sizes))
    return gather(parts, name)


def _stack(name: str, stack: Stack, d_model: int) -> Component:
    parts: list[Component] = []
    for group in layer_groups(stack):
        n = len(group.owners)
        if n:
            owned = dataclasses.replace(group, indices=group.owners)
            parts.append(gather(layer_parts(group.layer, d_model), owned.name, repeat=n))
    for layer in stack.layers():
        positions = layer.attention.positions
        if isinstance(positions, RelativeBuckets):
            sizes = {"R": positions.n_buckets, "h": layer.attention.n_heads}
            parts.append(leaf("relative_positions", symbol("R") * symbol("h"), sizes))
            break
    if stack.final_norm is not None:
        parts.append(norm("final_norm", stack.final_norm, D, {"d": d_model}))
    return Component(name, parts=tuple(parts))


def layer_parts(layer: Layer, d_model: int) -> list[Component]:
    """The components of one layer."""
    parts = [_attention("attention", layer.attention, d_model)]
    if layer.cross_attention is not None:
        parts.append(_attention("cross_attention", layer.cross_attention, d_model))
    parts.append(_feed_forward("feed_forward", layer.feed_forward, d_model))
    sizes = {"d": d_model}
    parts += [norm(name, layer.norm, D, sizes) for name in norm_names(layer)]
    if layer.memory_norm is not None:
        parts.append(norm("memory_norm", layer.memory_norm, D, sizes))
    return parts


def norm_names(layer: Layer) -> list[str]:
    """The normalisations around the sublayers: one each, two each in a sandwich, one for all when shared."""
    if layer.residual == "parallel_shared_norm":
        return ["norm"]
    sublayers = ["attention", *(["cross_attention"] if layer.cross_attention else []), "feed_forward"]
    sides = ["norm", "post_norm"] if layer.placement == "sandwich" else ["norm"]
    return [f"{sublayer}_{side}" for sublayer in sublayers for side in sides]


def attention_widths(attention: Attention, d_model: int) -> tuple[Formula, Formula, dict[str, int]]:
    """Widths of queries and of keys, and their sizes; a width that equals d is written d (R3)."""
    q, kv = attention.n_heads * attention.head_width, attention.n_kv_heads * attention.head_width
    wide = D if q == d_model else symbol("d_q")
    narrow = wide if kv == q else symbol("d_kv")
    return wide, narrow, {"d": d_model, "d_q": q, "d_kv": kv, "d_h": attention.head_width}


def _attention(name: str, attention: Attention, d_model: int) -> Component:
    q, kv, sizes = attention_widths(attention, d_model)
    parts = [
        linear("query", D, q, attention.bias.query, sizes),
        linear("key", D, kv, attention.bias.key, sizes),
        linear("value", D, kv, attention.bias.value, sizes),
        linear("output", q, D, attention.bias.output, sizes),
    ]
    if attention.qk_norm is not None:
        per_head = attention.qk_norm.axis == "head"
        for side, width in (("query_norm", q), ("key_norm", kv)):
            parts.append(norm(side, attention.qk_norm.norm, symbol("d_h") if per_head else width, sizes))
    return gather(parts, name)


def _feed_forward(name: str, network: FeedForward, d_model: int) -> Component:
    if isinstance(network, Experts):
        sizes = {"d": d_model, "E": network.n_experts}
        router = linear("router", D, symbol("E"), network.router_bias, sizes)
        expert = _feed_forward("experts", network.expert, d_model)
        expert = dataclasses.replace(expert, repeat=network.n_experts, active=network.top_k)
        assert router.formula is not None and expert.formula is not None
        formula = router.formula + symbol("E") * expert.formula
        return dataclasses.replace(gather([router, expert], name), formula=formula)
    f = symbol("f")
    sizes = {"d": d_model, "f": network.width}
    parts: list[Component] = []
    if isinstance(network, Gated):
        parts.append(linear("gate", D, f, network.bias_gate, sizes))
    parts.append(linear("up", D, f, network.bias_up, sizes))
    parts.append(linear("down", f, D, network.bias_down, sizes))
    return gather(parts, name)


def _head(head: Head, config: ModelConfig) -> Component:
    d_model, table = config.d_model, config.embedding
    sizes = {"d": d_model, "V": table.vocab_size, "w": table.width}
    parts: list[Component] = []
    if isinstance(head, TokenHead):
        narrow = head.transform is not None and table.width != d_model
        width = symbol("w") if narrow else D
        if head.transform is not None:
            inner = [linear("dense", D, width, head.transform.bias, sizes)]
            if head.transform.norm is not None:
                inner.append(norm("norm", head.transform.norm, width, sizes))
            parts.append(gather(inner, "transform"))
        shared = "embedding.table" if head.tied else None
        parts.append(leaf("weight", symbol("V") * width, sizes, shared_with=shared))
        if head.bias:
            parts.append(leaf("bias", symbol("V"), sizes))
        return gather(parts, "head")
    pooler = head.dense if isinstance(head, TaggingHead) else head.pooler
    if pooler is not None:
        parts.append(linear("dense", D, D, pooler.bias, sizes))
    if not isinstance(head, PoolingHead):
        parts.append(_labels(head, sizes))
    return gather(parts, "head")


def _labels(head: SequenceHead | TaggingHead, sizes: Sizes) -> Component:
    return linear("labels", D, symbol("L"), head.bias, {**sizes, "L": head.n_labels})
