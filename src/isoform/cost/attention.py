"""What attention stores for its backward pass, as `isoform.nn` computes it (R28).

Explicit attention stores ``B·h·T·K`` weights, fused attention none; the arithmetic is the same.
"""

from __future__ import annotations

import dataclasses

from isoform.config import Attention
from isoform.cost.formula import Formula, constant, symbol
from isoform.cost.parameters import attention_widths
from isoform.cost.storage import Block, Moment, Place, Stored, normed
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
    def head_major(self) -> bool:
        """Whether queries reach the kernel with heads before tokens in storage, as rotation leaves them."""
        qk = self.attention.qk_norm
        if qk is None or (self.rotates and qk.order == "before_rotation"):
            return self.rotates
        return qk.axis == "head" and (self.rotates or qk.norm.kind == "layer")

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
    masked: bool,
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
        masked: whether some real position may not be read by another.
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
        kernel=place.work.kernel(attention),
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
    )
    kept = [sides.stored("input", tokens * D)]
    if memory_copied:
        kept.append(sides.stored("memory", keys * D))
    kept += _heads(sides)
    kept += _fused(sides, masked) if sides.kernel == "fused" else _written_out(sides, masked)
    # Written out by token for the output projection, a copy unless queries lay so and the kernel kept to it.
    kept.append(sides.stored("context", sides.query))
    if sides.kernel == "fused" and sides.head_major:
        kept.append(sides.stored("kernel result", sides.query))
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
        w = s.place.widths
        # Autocast leaves rotated vectors as wide as the table of the rotation.
        norm = normed(qk.norm, s.query + s.key, groups, s.place, w.stream if late else w.compute)
        projections = not late and norm[0].name == "input"
        kept += [dataclasses.replace(n, name=f"norm {n.name}", sizes={**n.sizes, **s.more}) for n in norm]
        if projections:
            kept[0] = s.stored("projections", s.projected)
    if s.kernel == "composed":
        # Queries and keys times the root of the scale, values; all as wide as the queries.
        width = s.place.widths.wide
        return [
            *kept,
            s.stored("queries", s.query, width),
            s.stored("keys and values", s.repeated * 2, width),
        ]
    values: list[Stored] = [] if projections else [s.stored("projections", s.projected)]
    own = qk is not None or s.rotates or s.memory
    if s.kernel == "explicit" and not s.lone:
        return [*kept, s.stored("queries, keys, values", s.query + 2 * s.key)]
    if s.kernel == "explicit":
        queries = s.stored("queries and keys", s.query + s.key)
        grouped = [s.stored("grouped queries", s.query)] if s.group > 1 and not own else []
        return [*kept, *(([queries]) if own else grouped), *values]
    if s.group > 1:
        repeated = s.stored("repeated keys and values", s.repeated * 2)
        if not own:
            return [*kept, *values, repeated]
        # The rotated queries share one tensor with the keys.
        queries = s.query + s.key if s.rotates and qk is None else s.query
        return [*kept, s.stored("queries", queries), repeated]
    if s.memory and qk is None:
        return [s.stored("queries, keys, values", s.projected)]
    return [*kept, *([s.stored("queries and keys", s.query + s.key)] if own else []), *values]


def _fused(s: _Sides, masked: bool) -> list[Stored]:
    kept = [s.stored("normaliser", B * H * s.place.rows, s.place.widths.wide)]
    if s.attention.positions.kind in ("alibi", "relative_buckets"):
        kept.append(s.stored("bias", H * s.grid))
    elif s.attention.window is not None and masked:
        kept.append(s.stored("mask", s.grid))
    return kept


def _written_out(s: _Sides, masked: bool) -> list[Stored]:
    w, work = s.place.widths, s.place.work
    explicit = s.kernel == "explicit"
    kept: list[Stored] = []
    if explicit and s.attention.softcap is not None:
        kept.append(s.stored("capped scores", s.pairs))
    if explicit and masked:
        kept.append(s.stored("mask", s.grid, 1))
    # Half-precision scores go through softmax in float32; a float32 bias keeps them so until the product.
    widened = explicit and w.half
    promoted = widened and w.autocast and s.attention.positions.kind in ("alibi", "relative_buckets")
    width = w.wide if promoted or not explicit else w.compute
    if widened:
        kept.append(s.stored("wide weights", s.pairs, w.wide))
    if s.attention.dropout and work.mode == "train":
        kept.append(s.stored("dropout", s.pairs, w.noise(width)))
        if not widened:
            kept.append(s.stored("weights", s.pairs, width))
        kept.append(s.stored("dropped weights", s.pairs, w.wide if not explicit else w.compute))
    else:
        kept.append(s.stored("weights", s.pairs, w.wide if not explicit else w.compute))
    return kept


def _forward(s: _Sides) -> tuple[Stored, ...]:
    w = s.place.widths
    stream = s.stored("stream", s.tokens * D * 2, w.stream)
    heads = s.stored("projections", s.projected + (s.query + s.key if s.rotates else constant(0)))
    if s.kernel == "fused":
        repeated = s.repeated * 2 if s.group > 1 else constant(0)
        return stream, heads, s.stored("context", s.query + repeated)
    copies = 4 if w.half else 3 if s.attention.softcap is not None else 2
    return stream, heads, s.stored("scores", s.pairs * copies), s.stored("context", s.query)


def _working(s: _Sides) -> tuple[Moment, ...]:
    """Queries, keys and values as they were before they were copied, held to the end of the call."""
    w = s.place.widths
    turned = s.query + s.key if s.rotates and s.kernel != "fused" else constant(0)
    held = s.stored("projections", s.projected + turned)
    result = s.stored("result", s.tokens * D, w.stream)
    if s.kernel == "fused":
        own = s.rotates or s.attention.qk_norm is not None
        return (Moment((held, result) if own and s.group > 1 else (result,)),)
    scores = Moment((held, s.stored("scores", s.pairs)))
    return scores, Moment((held, s.stored("context", s.query), result))


def _backward(s: _Sides) -> tuple[Moment, ...]:
    w = s.place.widths
    stream = s.stored("stream", s.tokens * D, w.stream)
    heads = s.query * 2 + (s.repeated if s.group > 1 else s.key) * 2
    if s.kernel == "fused":
        kernel = Moment((stream, s.stored("context and heads", heads)))
    else:
        # Softmax: the gradients of the weights and of the scores, when context and dropped weights are gone.
        scores = s.stored("scores", s.pairs * 2, w.wide)
        gone = frozenset({"context", "dropped weights"} | ({"weights"} if w.half else set()))
        kernel = Moment((stream, scores, s.stored("values", s.key)), gone)
    # The heads' gradients put together, and laid out by token for the projections.
    kept = frozenset(t.name for t in (*_heads(s), *_fused(s, True), *_written_out(s, True))) | {
        "context",
        "kernel result",
    }
    packed = Moment((stream, s.stored("projections", s.projected * 2)), kept)
    done = Moment((stream, stream, s.stored("projections", s.projected)), kept, s.weights)
    return kernel, packed, done
