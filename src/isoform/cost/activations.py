"""What each part of a layer stores for its backward pass, as `isoform.nn` computes it (R28)."""

from __future__ import annotations

import dataclasses

from isoform.config import ActivationName, Experts, FeedForward, Gated, Layer, Norm, TwoLayer
from isoform.cost.attention import attention_block
from isoform.cost.formula import Formula, constant, symbol
from isoform.cost.parameters import layer_parts
from isoform.cost.storage import Block, Moment, Place, Stored, normed

B, D = symbol("B"), symbol("d")

# How many tensors of its input's size an activation stores beside its result, and whether its result as well.
_ACTIVATIONS: dict[ActivationName, tuple[int, bool]] = {
    "identity": (0, True),
    "relu": (0, True),
    "relu_squared": (1, False),
    "gelu": (1, False),
    "gelu_tanh": (1, False),
    "quick_gelu": (2, False),
    "silu": (1, False),
    "sigmoid": (0, True),
    "tanh": (0, True),
    "elu": (1, False),
    "leaky_relu": (1, False),
    "softplus": (1, False),
    "mish": (1, False),
}


def layer_blocks(layer: Layer, place: Place) -> list[Block]:
    """The blocks of one layer, in the order of the forward pass.

    Args:
        layer: its configuration.
        place: where it runs.
    """
    counts = {part.name: part.total for part in layer_parts(layer, place.sizes["d"])}
    parallel = layer.residual != "sequential"
    before = parallel or layer.placement in ("pre", "sandwich")
    found: list[Block] = []

    def normalise(name: str, at: Place, *, same_input: bool = False) -> None:
        norm = layer.memory_norm if name == "memory_norm" else layer.norm
        if name in counts and norm is not None:
            # Beside input and result: the stream, and under post also the increment, or the sublayer's input.
            held = {"pre": 0, "res_post": 1}.get(layer.placement, 0 if name == "memory_norm" else 2)
            held = 0 if layer.placement == "sandwich" and not name.endswith("post_norm") else held
            block = norm_block(norm, name, at, counts[name], held=held)
            block = _without_input(block) if same_input else block
            found.append(_waiting(block, place) if parallel and same_input else block)

    if layer.residual == "parallel_shared_norm":
        normalise("norm", place)
    for name in ("attention", "cross_attention", "feed_forward"):
        if name not in counts:
            continue
        second = parallel and name == "feed_forward"
        if before:  # both norms of a parallel layer read one tensor
            normalise(f"{name}_norm", place, same_input=second)
        if name == "cross_attention":  # all layers normalise the same memory, which the tape counts once
            normalise("memory_norm", dataclasses.replace(place, rows=symbol("S")), same_input=True)
        block = _sublayer(layer, name, place, counts[name])
        one_norm = layer.residual == "parallel_shared_norm"
        if second and one_norm and not place.widths.autocast:
            block = _without_input(block)
        # The other branch's gradient waits: the attention's to be used, the network's to be added to it.
        found.append(_waiting(block, place) if second or one_norm else block)
        normalise(f"{name}_post_norm", place)
        if not before:
            normalise(f"{name}_norm", place)
    return found


def _sublayer(layer: Layer, name: str, place: Place, weights: int) -> Block:
    if name == "feed_forward":
        block = feed_forward_block(name, layer.feed_forward, place, weights)
    elif name == "attention":
        block = attention_block(name, layer.attention, place, weights, memory=False, memory_copied=False)
    else:
        assert layer.cross_attention is not None
        copied = layer.memory_norm is not None or place.widths.autocast
        block = attention_block(
            name, layer.cross_attention, place, weights, memory=True, memory_copied=copied
        )
    kept = list(block.kept)
    if place.widths.copies:
        kept.append(Stored("weights in half precision", constant(weights), {}, place.widths.compute))
    dropped = layer.increment_dropout("feed_forward" if name == "feed_forward" else "attention")
    if dropped and place.work.mode == "train":
        kept.append(
            place.stored("residual dropout", B * place.rows * D, place.widths.noise(place.widths.compute))
        )
    return dataclasses.replace(block, kept=tuple(kept))


def _without_input(block: Block) -> Block:
    return dataclasses.replace(block, kept=tuple(s for s in block.kept if s.name != "input"))


def _waiting(block: Block, place: Place) -> Block:
    """With the other branch's result, or its gradient, alive beside it."""
    gradient = place.stored("other branch", B * place.rows * D, place.widths.stream)
    moments = (dataclasses.replace(m, alive=(*m.alive, gradient)) for m in block.backward)
    return dataclasses.replace(block, forward=(*block.forward, gradient), backward=tuple(moments))


def norm_block(norm: Norm, name: str, place: Place, weights: int, *, held: int = 0) -> Block:
    """Its input and statistics; on CPU a root-mean-square norm is composed and stores x̂ as well.

    ``held``: states of the stream that are alive beside its input and result.
    """
    w, tokens = place.widths, B * place.rows
    kept = normed(norm, tokens * D, tokens, place, w.stream)
    # The gradients of the stream beside it, of its result and of its input; a composed norm has one more of
    # each intermediate.
    composed = norm.kind == "rms" and not (place.work.device == "cuda" and w.stream > 2)
    width = w.wide if composed else w.stream
    gradients = place.stored("gradients", tokens * D * (5 if composed else 3), width)
    moment = Moment((gradients,), frozenset({"normalised"} if composed else ()), weights)
    copies = place.stored("stream", tokens * D * (held + (3 if composed else 2)), width)
    return Block(name, kept, (copies,), (), (moment,), weights)


def feed_forward_block(name: str, network: FeedForward, place: Place, weights: int) -> Block:
    """A two-layer or gated network, or a router and the experts it sends each token to."""
    if isinstance(network, Experts):
        return _experts_block(name, network, place, weights)
    return _network(name, network, B * place.rows, place, weights)


def _network(
    name: str,
    network: TwoLayer | Gated,
    tokens: Formula,
    place: Place,
    weights: int,
    *,
    branches: tuple[int, int] | None = None,
    entry: str = "input",
) -> Block:
    """``branches``: where biases are added outside the product, tensors of the hidden width that hold gate
    and content, in one and each with its bias; ``entry`` names the input."""
    w = place.widths
    # A float32 bias, added outside the product, widens what follows under autocast.
    apart = w.weight if w.autocast else w.compute
    biased = branches is not None and isinstance(network, Gated) and network.bias_gate
    gate_width = apart if biased else w.compute
    shared, own = branches or (2, 0)

    def stored(what: str, elements: Formula, width: int = w.compute) -> Stored:
        return place.stored(what, elements, width, f=network.width)

    inner = tokens * symbol("f")
    gated = isinstance(network, Gated)
    extra, result = _ACTIVATIONS[network.activation]
    dropout = bool(network.dropout) and place.work.mode == "train"
    kept = [stored(entry, tokens * D)]
    if gated:
        kept.append(stored("gate and content", inner * shared))
        kept.append(stored("biased branches", inner * own, apart))
        if network.activation != "identity":
            kept.append(stored("activated gate", inner, gate_width))
        # Its input is a view of what is already there; a second tensor beside the result is not.
        extra, result = max(extra - 1, 0) + (network.activation == "relu_squared"), False
    if extra:
        kept.append(stored("activation", inner * extra, gate_width))
    if dropout:
        kept.append(stored("dropout", inner, w.noise(w.compute)))
        if result and network.activation != "identity":
            kept.append(stored("activation", inner))
    kept.append(stored("hidden", inner))
    stream = stored("stream", tokens * D, w.stream)
    gone = frozenset() if result and not dropout else frozenset({"hidden"})
    through = Moment(
        (stream, stored("hidden", inner * (3 if gated else 2))), gone, weights // (3 if gated else 2)
    )
    everything = frozenset(s.name for s in kept if s.name != entry)
    done = Moment((stream, stream, stored("hidden", inner * (2 if gated else 1))), everything, weights)
    forward = (stored("stream", tokens * D * 2, w.stream), stored("hidden", inner * (4 if gated else 2)))
    return Block(name, tuple(kept), forward, (), (through, done), weights)


def _experts_block(name: str, network: Experts, place: Place, weights: int) -> Block:
    w, k = place.widths, network.top_k
    tokens = B * place.rows
    sizes = {"k": k, "E": network.n_experts}

    def widened(things: tuple[Stored, ...]) -> tuple[Stored, ...]:
        return tuple(dataclasses.replace(s, sizes={**s.sizes, **sizes}) for s in things)

    branches = _branches(network.expert)
    routed = symbol("k") * tokens
    inner = _network(name, network.expert, routed, place, weights, branches=branches, entry="routed tokens")
    kept = (
        place.stored("input", tokens * D, w.compute),
        place.stored("routing shares", tokens * symbol("E"), w.wide, **sizes),
        place.stored("routing choices", symbol("k") * tokens * 2, 8, **sizes),
        *widened(inner.kept),
        # Before and after they are weighed.
        place.stored("outputs", symbol("k") * tokens * D * 2, w.compute, **sizes),
    )
    # The backward pass takes one expert after the other, with an even share of the tokens each. Its gradient
    # arrives in a tensor as large as the whole stack of weights and is added to the others'.
    sizes["n"] = -(-k * tokens.value(place.sizes) // network.n_experts)
    share = _network(name, network.expert, symbol("n"), place, weights)
    stack = weights * 2 // 3 if isinstance(network.expert, Gated) else weights // 2
    whole = Stored("gradient of one expert", constant(stack), {}, w.weight)
    moments = tuple(Moment((*widened(m.alive), whole), weights=weights) for m in share.backward)
    result = place.stored("result", tokens * D * 2, w.compute)
    return Block(name, kept, (*widened(share.forward), result), (), moments, weights)


def _branches(expert: TwoLayer | Gated) -> tuple[int, int]:
    """Hidden widths stored for gate and content: a bias takes a branch out of the tensor they share."""
    if not isinstance(expert, Gated):
        return 2, 0
    extra, _ = _ACTIVATIONS[expert.activation]
    gate = extra - (expert.activation == "relu_squared") > 0 or expert.activation == "identity"
    packed = (gate and not expert.bias_gate) or not expert.bias_up
    return 2 * packed, (gate and expert.bias_gate) + expert.bias_up


def activation_stores(name: ActivationName) -> tuple[int, bool]:
    """Tensors of its input's size that an activation stores beside its result, and whether that as well."""
    return _ACTIVATIONS[name]
