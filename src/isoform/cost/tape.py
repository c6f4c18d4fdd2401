"""The blocks of a whole forward pass, in order: what is stored where, until the backward pass undoes it."""

from __future__ import annotations

import dataclasses

from isoform.config import Embedding, ModelConfig, Rotary, Stack, TaggingHead, TokenHead, Transform
from isoform.cost.activations import activation_stores, layer_blocks, norm_block
from isoform.cost.formula import Formula, constant, symbol
from isoform.cost.groups import layer_groups
from isoform.cost.parameters import parameters
from isoform.cost.storage import Block, Moment, Place, Stored, Widths, normed
from isoform.cost.workload import CHUNK, Workload

B, D = symbol("B"), symbol("d")
Counts = dict[str, int]


@dataclasses.dataclass(frozen=True)
class Step:
    """One block at its place in the forward pass; equal layers share their blocks.

    Attributes:
        name: what the block's name is prefixed with, e.g. ``decoder.layers.3``; empty for none.
        block: the block.
        begins: whether the gradients of its weights begin here, on the way back: at the last use of shared
            ones. Those of earlier uses are added to them.
        layer: for a block of a layer the layer's input, which is all that recomputation stores of it.
    """

    name: str
    block: Block
    begins: bool = True
    layer: Stored | None = None

    @property
    def path(self) -> str:
        """The full name."""
        return f"{self.name}.{self.block.name}" if self.name else self.block.name


def tape(config: ModelConfig, work: Workload) -> list[Step]:
    """All blocks in the order of the forward pass; layers are named ``decoder.layers.3.attention``."""
    decode = work.mode == "decode"
    widths = Widths.of(work)
    sizes = {"B": work.rows, "T": 1 if decode else work.length, "d": config.d_model, "K": work.length}
    counts = {path: part.total for path, part in parameters(config).root.walk()}
    own = Place(
        symbol("T"), symbol("K") if decode else symbol("T"), sizes, work, widths.after(config.embedding)
    )
    source = own
    tied = isinstance(config.head, TokenHead) and config.head.tied
    steps: list[Step] = []
    if work.source_length is not None:
        sizes["S"] = work.source_length
        assert config.source is not None
        source = Place(symbol("S"), symbol("S"), sizes, work, widths.after(config.source))
    if config.encoder is not None and not decode:
        name, table = ("embedding", config.embedding) if config.source is None else ("source", config.source)
        begun = tied if name == "embedding" else config.tie_source
        steps.append(Step("", _embedding(name, table, source, counts, begun=begun)))
        steps += _stack("encoder", config.encoder, source, counts)
        if config.decoder is not None:
            memory = source.stored("memory", B * symbol("S") * D, source.widths.stream)
            steps.append(Step("", Block("memory", (memory,), (), (), (Moment((memory, memory)),))))
    if config.decoder is not None:
        steps.append(Step("", _embedding("embedding", config.embedding, own, counts, begun=tied)))
        steps += _stack("decoder", config.decoder, own, counts)
    return [*steps, *(Step("", block) for block in _head(config, own, counts))]


def _embedding(name: str, table: Embedding, place: Place, counts: Counts, *, begun: bool) -> Block:
    """``begun``: the table's gradient is there already, from a tied head or the other stream (6.36)."""
    w, tokens, d_model = place.widths, B * place.rows, place.sizes["d"]
    place = place.widened(w=table.width)
    width = D if table.width == d_model else symbol("w")
    inner = D if table.inner_width(d_model) == d_model else symbol("w")
    kept: list[Stored] = []
    if table.projection is not None:
        kept.append(place.stored("projection input", tokens * width, w.compute))
    if table.norm is not None:
        kept += normed(table.norm, tokens * inner, tokens, place, w.stream)
    if table.dropout and place.work.mode == "train":
        kept.append(place.stored("dropout", tokens * inner, w.noise(w.stream)))
    # A look-up's gradient is as large as the table, also where it joins that of another use of it.
    again = Stored("gradient of the table", constant(table.vocab_size * table.width * begun), {}, w.weight)
    weights = counts[name] - (counts[f"{name}.table"] if begun else 0)
    gradients = place.stored("gradients", tokens * D * 2, w.stream)
    moment = Moment((gradients, again), frozenset(s.name for s in kept), weights)
    forward = place.stored("stream", tokens * D * 3, w.stream)
    return Block(name, tuple(kept), (forward,), (), (moment,), weights)


def _stack(name: str, stack: Stack, place: Place, counts: Counts) -> list[Step]:
    by_index: dict[int, list[Block]] = {}
    for group in layer_groups(stack):
        by_index |= dict.fromkeys(group.indices, layer_blocks(group.layer, place))
    steps = [Step(name, _shared(stack, place, counts.get(f"{name}.relative_positions", 0)))]
    stream = place.stored("layer input", B * place.rows * D, place.widths.stream)
    last_use = {stack.owner(index): index for index in range(stack.n_layers)}
    for index in range(stack.n_layers):
        begins = last_use[stack.owner(index)] == index
        steps += [Step(f"{name}.layers.{index}", block, begins, stream) for block in by_index[index]]
    if stack.final_norm is not None:
        weights = counts[f"{name}.final_norm"]
        steps.append(Step(name, norm_block(stack.final_norm, "final_norm", place, weights)))
    if stack.final_dropout and place.work.mode == "train":
        noise = place.stored("dropout", B * place.rows * D, place.widths.noise(place.widths.stream))
        steps.append(Step(name, Block("final_dropout", (noise,))))
    return steps


def _shared(stack: Stack, place: Place, weights: int) -> Block:
    """Rotation tables, distance biases and masks, made once for all layers of a kind."""
    kept: list[Stored] = []
    made: list[Stored] = []
    w, train, grid = place.widths, place.work.mode == "train", place.rows * place.keys
    # A row's prefix is its own, so its mask is too.
    masks = B * grid if stack.visibility == "prefix" else grid
    inner = w.wide if w.half and place.work.device == "cpu" else w.compute
    kinds = {(a.positions, a.n_heads, a.window): a for a in (layer.attention for layer in stack.layers())}
    for (positions, heads, window), attention in kinds.items():
        if isinstance(positions, Rotary):
            table = place.rows * symbol("d_r") * 2
            kept.append(place.stored("rotation table", table, w.stream, d_r=positions.width))
        if positions.kind == "relative_buckets":
            made.append(place.stored("distances", grid * 6, 8))
            if train:
                kept.append(place.stored("distances", grid, 8))
        fused = place.kernel(attention, place.keys) == "fused"
        if train and not fused:
            continue  # added to the scores, which the backward pass does not look at
        narrow = window is not None and window < place.keys.value(place.sizes)
        if positions.kind in ("alibi", "relative_buckets"):
            # For a fused kernel the mask is added to it; until the pass ends, the bias alone stays too.
            kept.append(place.stored("bias", (masks if fused else grid) * symbol("h"), inner, h=heads))
            if fused and not train:
                kept.append(place.stored("bias alone", grid * symbol("h"), inner, h=heads))
                if narrow or stack.visibility != "bidirectional":
                    kept.append(place.stored("mask alone", masks, inner))
        elif narrow or stack.visibility == "prefix" or (not fused and stack.visibility != "bidirectional"):
            kept.append(place.stored("mask", masks, inner))
    return Block("shared", tuple(kept), tuple(made), weights=weights)


def _head(config: ModelConfig, place: Place, counts: Counts) -> list[Block]:
    head, w, work = config.head, place.widths, place.work
    # The caller holds the hidden states; a token head's product stores the same tensor.
    hidden = place.stored("hidden states", B * place.rows * D, w.stream)
    if head is None:
        return [Block("hidden", (hidden,))]
    last = work.mode == "prefill" and config.decoder is not None
    tokens = B if last else B * place.rows
    place = place.widened(V=config.embedding.vocab_size, w=config.embedding.width)
    if not isinstance(head, TokenHead):
        tokens = tokens if isinstance(head, TaggingHead) else B
        kept = (hidden, place.stored("input", tokens * D, w.compute))
        gradients = place.stored("gradients", tokens * D * 2, w.compute)
        return [Block("head", kept, (gradients,), (), (Moment((gradients,)),), counts["head"])]
    chunked = work.mode == "train" and work.loss == "chunked"
    rows = max(CHUNK // place.sizes["V"], 1)
    if chunked and tokens.value(place.sizes) > rows:
        return [_in_pieces(head, rows, hidden, place, counts)]
    blocks: list[Block] = []
    width = D
    if head.transform is not None:
        width = D if config.embedding.width == place.sizes["d"] else symbol("w")
        blocks.append(_transform(head.transform, tokens, width, place, counts["head.transform"]))
    if chunked:
        return [*blocks, _at_once(head, width, hidden, place, counts)]
    scores = tokens * symbol("V")
    capped = head.softcap is not None
    kept = [place.stored("input", tokens * width, w.compute), place.stored("logits", scores, w.compute)]
    if capped:
        kept.append(place.stored("capped logits", scores, w.compute))
    if w.autocast or head.transform is not None:
        kept.append(hidden)
    kept += _copied(width, place)
    begun = _begun(head, width, place, counts)
    gradients = place.stored("gradients", scores * (2 if capped else 1) + tokens * width, w.compute)
    forward = place.stored("logits", scores * (2 if capped else 1), w.compute)
    blocks.append(Block("head", tuple(kept), (forward,), (), (Moment((gradients,), weights=begun),), begun))
    if work.mode == "train":
        loss = place.stored("log-probabilities", scores, w.wide)
        gradients = place.stored("gradients", scores * 2, w.wide)
        blocks.append(Block("loss", (loss,), (), (), (Moment((gradients,)),)))
    return blocks


def _begun(head: TokenHead, width: Formula, place: Place, counts: Counts) -> int:
    """Weights whose gradients begin at the head: a tied table's too, which meets the look-up's at the end."""
    own = counts["head"] - counts.get("head.transform", 0)
    return own + ((width * symbol("V")).value(place.sizes) if head.tied else 0)


def _at_once(head: TokenHead, width: Formula, hidden: Stored, place: Place, counts: Counts) -> Block:
    """The head and a loss that stores shares in place of scores."""
    w, tokens = place.widths, B * place.rows
    begun = _begun(head, width, place, counts)
    logits, (widest, last) = _scores(head, tokens, place)
    kept = (place.stored("input", tokens * width, w.compute), hidden, *logits, *_copied(width, place))
    spent = frozenset(s.name for s in logits)
    moments = (Moment(widest), Moment(last, spent, begun))
    return Block("head", kept, (), (), moments, begun)


def _in_pieces(head: TokenHead, rows: int, hidden: Stored, place: Place, counts: Counts) -> Block:
    """The head and a loss that takes so many states at a time, and makes their gradients with their scores:
    what is stored are the gradients of the states and, as one sum, of the head's weights."""
    place = place.widened(n=rows)
    begun = counts["head"] + ((symbol("w") * symbol("V")).value(place.sizes) if head.tied else 0)
    logits, (widest, last) = _scores(head, symbol("n"), place)
    whole = dataclasses.replace(hidden, name="gradients of the states")
    sums = Stored("gradients of the weights", constant(begun), {}, place.widths.weight)
    piece = dataclasses.replace(sums, name="gradients of one piece")
    there = (hidden, hidden, *_copied(symbol("w"), place))
    forward = (Moment((*there, *logits, *widest)), Moment((*there, *last, piece)))
    return Block("head", (whole, sums), (), forward, (Moment((whole,), weights=begun),), begun)


def _copied(width: Formula, place: Place) -> tuple[Stored, ...]:
    w = place.widths
    return (place.stored("weights in half precision", width * symbol("V"), w.compute),) if w.copies else ()


def _scores(
    head: TokenHead, rows: Formula, place: Place
) -> tuple[tuple[Stored, ...], tuple[tuple[Stored, ...], tuple[Stored, ...]]]:
    """Of so many states: what is stored; the gradients beside it, and those that the weights' begin with,
    when it is no longer needed."""
    w, scores = place.widths, rows * symbol("V")
    logits = [place.stored("logits", scores, w.wide)]
    if head.softcap is not None:
        logits.append(place.stored("capped logits", scores, w.compute))
    wide = place.stored("gradients", scores, w.wide)
    narrow = place.stored("narrow gradients", scores, w.compute)
    return tuple(logits), ((wide, narrow) if w.half else (wide,), (narrow,))


def _transform(transform: Transform, tokens: Formula, width: Formula, place: Place, weights: int) -> Block:
    w = place.widths
    extra, result = activation_stores(transform.activation)
    kept = [
        place.stored("input", tokens * D, w.compute),
        place.stored("activation", tokens * width * (extra + result), w.compute),
    ]
    if transform.norm is not None:
        kept += normed(transform.norm, tokens * width, tokens, place, w.compute)
    gradients = place.stored("gradients", tokens * width * 3, w.compute)
    return Block("head.transform", tuple(kept), (gradients,), (), (Moment((gradients,)),), weights)
