"""What attention stores for its backward pass, as `isoform.nn` computes it (R28).

Explicit attention stores ``B·h·T·K`` weights, fused attention none; the arithmetic is the same.
"""

from __future__ import annotations

import dataclasses

from isoform.config import Attention, Rotary
from isoform.cost.formula import Formula, constant, symbol
from isoform.cost.parameters import attention_widths
from isoform.cost.storage import Block, Moment, Place, Stored, normed, stored_bytes
from isoform.cost.workload import Kernel

B, D, H = symbol("B"), symbol("d"), symbol("h")


@dataclasses.dataclass(frozen=True)
class _Sides:
    """Elements of what attention works on, and what surrounds it.

    Attributes:
        query: queries, B·T·d_q.
        key: keys, or values, B·K·d_kv.
        repeated: keys with every head of a group written out, B·K·d_q.
        pairs: scores or weights, B·h·T·K.
        grid: one matrix of pairs, T·K.
        lone: one row, or one key head: then the heads of all rows lie evenly and need no copy.
    """

    attention: Attention
    kernel: Kernel
    place: Place
    memory: bool
    tokens: Formula
    query: Formula
    key: Formula
    repeated: Formula
    pairs: Formula
    grid: Formula
    more: dict[str, int]
    weights: int
    query_width: Formula
    key_width: Formula

    @property
    def group(self) -> int:
        return self.attention.n_heads // self.attention.n_kv_heads

    @property
    def lone(self) -> bool:
        return self.place.sizes["B"] == 1 or self.attention.n_kv_heads == 1

    @property
    def rotates(self) -> bool:
        return self.attention.positions.kind == "rotary"

    @property
    def converted(self) -> bool:
        """Whether half precision is widened for the kernel, as on CPU."""
        return self.place.widths.half and self.place.work.device == "cpu"

    @property
    def width(self) -> int:
        """Bytes an element takes inside the kernel."""
        return self.place.widths.wide if self.converted else self.place.widths.compute

    @property
    def head_major(self) -> bool:
        """Whether queries reach the kernel with heads before tokens in storage.

        Projections leave tokens first. Norms over heads and the joining of channels that do not rotate turn
        the order round; a norm over the whole projection turns it back.
        """
        qk, positions = self.attention.qk_norm, self.attention.positions
        joined = isinstance(positions, Rotary) and positions.width < self.attention.head_width
        if qk is None:
            return joined
        early = qk.order == "before_rotation" or not self.rotates
        return qk.axis == "head" or (early and joined)

    @property
    def projected(self) -> Formula:
        """Self-attention has one tensor for queries, keys and values."""
        return self.query + 2 * self.key

    def stored(self, what: str, elements: Formula, width: int | None = None) -> Stored:
        width = self.place.widths.compute if width is None else width
        return self.place.stored(what, elements, width, **self.more)


def attention_block(
    name: str,
    attention: Attention,
    place: Place,
    weights: int,
    *,
    memory: bool,
    memory_copied: bool,
) -> Block:
    """Multi-head attention: input, queries, keys and values, what the kernel stores, context.

    Args:
        name: of the block.
        attention: its configuration.
        place: where it runs.
        weights: elements of its parameters.
        memory: whether keys and values come from the source.
        memory_copied: whether the projections read a tensor of the source that is this layer's own.
    """
    q, kv, more = attention_widths(attention, place.sizes["d"])
    columns = symbol("S") if memory else place.keys
    tokens, keys = B * place.rows, B * columns
    sides = _Sides(
        attention=attention,
        kernel=place.kernel(attention, columns),
        place=place,
        memory=memory,
        tokens=tokens,
        query=tokens * q,
        key=keys * kv,
        repeated=keys * q,
        pairs=tokens * H * columns,
        grid=place.rows * columns,
        more=more | {"h": attention.n_heads},
        weights=weights,
        query_width=q,
        key_width=kv,
    )
    kept = [sides.stored("input", tokens * D)]
    if memory_copied:
        kept.append(sides.stored("memory", keys * D))
    kept += _heads(sides)
    kept += _fused(sides) if sides.kernel == "fused" else _written_out(sides)
    # Written out by token for the output projection, a copy unless queries lay so and the kernel kept to it.
    kept.append(sides.stored("context", sides.query))
    if sides.kernel == "fused" and (sides.converted or sides.head_major):
        kept.append(sides.stored("kernel result", sides.query, sides.width))
    return Block(name, tuple(kept), _forward(sides), _working(sides), _backward(sides), weights)


def _heads(s: _Sides) -> list[Stored]:
    """Queries, keys and values, and what their norms store."""
    qk = s.attention.qk_norm
    kept: list[Stored] = []
    projections = False  # whether the tensors that the projections made are stored
    if qk is not None:
        late = s.rotates and qk.order == "after_rotation"
        heads = H if qk.axis == "head" else constant(1)
        groups = B * heads * (s.place.rows * 2)
        norm = normed(qk.norm, s.query + s.key, groups, s.place, s.place.widths.compute)
        projections = not late and norm[0].name == "input"
        kept += [dataclasses.replace(n, name=f"norm {n.name}", sizes={**n.sizes, **s.more}) for n in norm]
        if projections:
            kept[0] = s.stored("projections", s.projected)
    values: list[Stored] = [] if projections else [s.stored("projections", s.projected)]
    if s.kernel == "explicit":
        return kept + _copied(s, values)
    if s.kernel == "composed":
        # Queries and keys times the root of the scale, values; all as wide as the queries.
        repeated = s.stored("keys and values", s.repeated * 2, s.width)
        return [*kept, s.stored("queries", s.query, s.width), repeated]
    own = qk is not None or s.rotates or s.memory
    if s.group > 1:
        repeated = s.stored("repeated keys and values", s.repeated * 2, s.width)
        if s.converted:
            return [*kept, s.stored("queries", s.query, s.width), repeated]
        if not own:
            return [*kept, *values, repeated]
        # The rotated queries share one tensor with the keys.
        queries = s.query + s.key if s.rotates and qk is None else s.query
        return [*kept, s.stored("queries", queries), repeated]
    if s.converted or (s.memory and qk is None):
        return [*kept, s.stored("queries, keys, values", s.projected, s.width)]
    return [*kept, *([s.stored("queries and keys", s.query + s.key)] if own else []), *values]


def _copied(s: _Sides, values: list[Stored]) -> list[Stored]:
    """For explicit products: scaled queries, and keys and values laid out by head where they aren't yet."""
    if s.converted or not s.lone:
        return [s.stored("queries, keys, values", s.projected, s.width)]
    queries = s.stored("queries", s.query)
    if s.attention.qk_norm is not None:
        return [queries, s.stored("keys", s.key), *values]
    if s.rotates:
        return [queries, s.stored("rotated", s.query + s.key), *values]
    return [s.stored("queries, keys, values", s.projected)] if s.memory else [queries, *values]


def _fused(s: _Sides) -> list[Stored]:
    return [s.stored("normaliser", B * H * s.place.rows, s.place.widths.wide)]


def _written_out(s: _Sides) -> list[Stored]:
    w, work = s.place.widths, s.place.work
    kept: list[Stored] = []
    if s.kernel == "explicit" and s.attention.softcap is not None:
        kept.append(s.stored("capped scores", s.pairs, s.width))
    # Half-precision scores go through softmax in float32.
    widened = s.kernel == "explicit" and s.width == 2
    if widened:
        kept.append(s.stored("wide weights", s.pairs, w.wide))
    if s.attention.dropout and work.mode == "train":
        kept.append(s.stored("dropout", s.pairs, w.noise(s.width)))
        if not widened:
            kept.append(s.stored("weights", s.pairs, s.width))
        kept.append(s.stored("dropped weights", s.pairs, s.width))
    else:
        kept.append(s.stored("weights", s.pairs, s.width))
    return kept


def _forward(s: _Sides) -> tuple[Stored, ...]:
    """The fuller of two moments: while the kernel runs, and when the output projection has."""
    w = s.place.widths
    # Projected now, turned, normed; in decode the rest comes from the cache.
    turned, both = B * s.place.rows * (s.query_width + s.key_width), s.attention.qk_norm is not None
    new = turned * (1 + s.rotates + both) + B * s.place.rows * s.key_width
    held = [s.stored("stream", s.tokens * D * 2, w.stream), s.stored("heads", new)]
    if s.converted:
        held.append(s.stored("widened", s.projected, s.width))
    moved = s.converted or s.head_major or s.kernel != "fused"
    after = (
        *held,
        s.stored("context", s.query * (2 if moved else 1), s.width),
        s.stored("result", s.tokens * D, w.stream),
    )
    return max((*held, *_inside(s)), after, key=stored_bytes)


def _inside(s: _Sides) -> list[Stored]:
    context = s.stored("context", s.query, s.width)
    decode = s.place.work.mode == "decode"
    if s.kernel == "fused":
        # A single query without a bias stands for its group; else keys are written out for every head of it.
        biased = s.attention.positions.kind in ("alibi", "relative_buckets")
        if s.group > 1 and (biased or not decode):
            return [context, s.stored("repeated keys and values", s.repeated * 2, s.width)]
        return [context]
    grouped = s.stored("grouped queries", s.query if s.group > 1 else constant(0), s.width)
    copies = 4 if s.width == 2 else 3 if s.attention.softcap is not None else 2
    scores = [grouped, s.stored("scores", s.pairs * copies, s.width)]
    # A cache lies by head already; fresh values are copied for the product.
    values = s.stored("values", constant(0) if s.lone or decode else s.key, s.width)
    read = [grouped, s.stored("scores", s.pairs * 2, s.width), values, context]
    return max(scores, read, key=stored_bytes)


def _working(s: _Sides) -> tuple[Moment, ...]:
    """Queries, keys and values as they were before they were copied, held to the end of the call."""
    w = s.place.widths
    turned = s.query + s.key if s.rotates and s.kernel != "fused" else constant(0)
    held = s.stored("projections", s.projected + turned)
    result = s.stored("result", s.tokens * D, w.stream)
    if s.kernel == "fused":
        own = s.converted or ((s.rotates or s.attention.qk_norm is not None) and s.group > 1)
        return (Moment((held, result) if own else (result,)),)
    wide = s.stored("widened", s.projected if s.converted else constant(0), s.width)
    biased = s.attention.positions.kind in ("alibi", "relative_buckets")
    added = s.stored("bias and mask", H * s.grid if biased else s.grid, s.width)
    scores = Moment((held, wide, added, s.stored("scores", s.pairs, s.width)))
    return scores, Moment((held, s.stored("context", s.query), result))


def _backward(s: _Sides) -> tuple[Moment, ...]:
    w = s.place.widths
    stream = s.stored("stream", s.tokens * D, w.stream)
    heads = s.query * 2 + (s.repeated if s.group > 1 else s.key) * 2
    if s.kernel == "fused":
        kernel = Moment((stream, s.stored("context and heads", heads, s.width)))
    else:
        # Softmax: the gradients of the weights and of the scores, when context and dropped weights are gone.
        wide = s.width == 2
        scores = s.stored("scores", s.pairs * 2, w.wide if wide else s.width)
        gone = frozenset({"context", "dropped weights"} | ({"weights"} if wide else set()))
        kernel = Moment((stream, scores, s.stored("values", s.key, s.width)), gone)
    # The heads' gradients put together, and laid out by token for the projections.
    kept = frozenset(t.name for t in (*_heads(s), *_fused(s), *_written_out(s))) | {
        "context",
        "kernel result",
    }
    packed = Moment((stream, s.stored("projections", s.projected * 2)), kept)
    done = Moment((stream, stream, s.stored("projections", s.projected)), kept, s.weights)
    return kernel, packed, done
