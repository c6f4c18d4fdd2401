"""One forward pass of a network, layer by layer: sizes, reading patterns, and what it would say so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from isoform.errors import ConfigError
from isoform.nn import Stack, Transformer, capture
from isoform.nn.heads import TokenHead
from isoform.tokens import Tokens

Side = Literal["encoder", "decoder", "cross"]
_NAMES: dict[Side, str] = {
    "encoder": "encoder self-attention", "decoder": "decoder self-attention", "cross": "cross-attention"
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Guess:
    """A token, and the probability it is given."""

    id: int
    probability: float


@dataclasses.dataclass(frozen=True)
class Sublayer:
    """One residual update.

    Args:
        stack: "encoder" or "decoder".
        layer: its number, from 0.
        kind: "attention", "cross_attention", "feed_forward"; "parallel" where a layer is one update.
        shape: of the stream, ``[batch, length, d_model]``.
        stream: root mean square of the stream behind it, over real positions and channels.
        increment: root mean square of what it adds, before a residual scale.
        entropy: of each head's attention weights, in nats, mean over the queries; empty without attention.
    """

    stack: str
    layer: int
    kind: str
    shape: tuple[int, ...]
    stream: float
    increment: float
    entropy: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """What `trace` saw of one row.

    Args:
        ids: the tokens of the stream the head reads.
        source_ids: those of the source, for an encoder–decoder.
        sublayers: residual updates, in order of computation.
        guesses: for each layer of the stack that the head reads, the likeliest tokens at every position when
            its stream goes straight through final norm and head ("logit lens"); the last entry is the
            network's own answer. Empty without a head over tokens.
        weights: ``(side, layer)`` to ``[heads, queries, keys]`` attention weights, padding left out.
    """

    ids: tuple[int, ...]
    source_ids: tuple[int, ...] | None
    sublayers: tuple[Sublayer, ...]
    guesses: tuple[tuple[tuple[Guess, ...], ...], ...]
    weights: dict[tuple[Side, int], Float[Tensor, "h query key"]] = dataclasses.field(repr=False)

    def attention(self, side: Side, layer: int, head: int) -> Float[Tensor, "query key"]:
        """The weights of one head: a reading pattern, not an explanation (R36).

        Raises:
            ConfigError: no such side, layer or head.
        """
        if (side, layer) not in self.weights:
            there = ", ".join(f"{_NAMES[s]} in {self._layers(s)}" for s in _NAMES if self._layers(s))
            raise ConfigError(f"layer {layer} has no {_NAMES[side]}; this network has {there}")
        found = self.weights[side, layer]
        if not 0 <= head < found.shape[0]:
            raise ConfigError(f"no head {head} in layer {layer}; heads 0 to {found.shape[0] - 1}")
        return found[head]

    def _layers(self, side: Side) -> str:
        """Those that have it, in words; empty: none has."""
        layers = sorted(number for s, number in self.weights if s == side)
        if len(layers) > 1 and layers == list(range(layers[0], layers[-1] + 1)):
            return f"layers {layers[0]} to {layers[-1]}"
        return f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}" if layers else ""


@torch.no_grad()
def trace(model: Transformer, tokens: Tokens, source: Tokens | None = None, *, top: int = 3) -> Trace:
    """Run the network once, in eval mode, and take note; attention writes its weights out for it.

    Args:
        model: any Isoform network; its mode is restored.
        tokens: one row: the only stream, or the target side.
        source: one row, for an encoder–decoder.
        top: how many guesses to keep at each position.

    Raises:
        ConfigError: more than one row.
    """
    if tokens.batch != 1 or (source is not None and source.batch != 1):
        raise ConfigError("trace reads one text at a time; expected a batch of one row")
    watched = list(_updates(model))
    visits: dict[str, list[Tensor]] = {}

    def watch(path: str) -> Callable[[Tensor], Tensor]:
        def note(value: Tensor) -> Tensor:
            visits.setdefault(path, []).append(value)
            return value

        return note

    paths = dict.fromkeys(path for update in watched for path in update.paths())
    training = model.training
    model.eval()
    try:
        with capture(model, replace={path: watch(path) for path in paths}):
            output = model(tokens, source)
    finally:
        model.train(training)
    sublayers: list[Sublayer] = []
    weights: dict[tuple[Side, int], Tensor] = {}
    streams: list[Tensor] = []
    for update in watched:
        # A layer whose parameters serve several places runs once at each of them, in order.
        stream, increment = visits[update.output].pop(0), visits[update.increment].pop(0)
        side = source if update.stack == "encoder" and source is not None else tokens
        read = None
        if update.weights is not None:
            crossing = update.kind == "cross_attention"
            queries, keys = (_real(s) for s in (side, source if crossing and source is not None else side))
            read = visits[update.weights].pop(0)[0][:, queries][:, :, keys]
            weights["cross" if crossing else update.stack, update.layer] = read
        sublayers.append(_sublayer(update, side, stream, increment, read))
        if update.last and update.stack == _main(model):
            streams.append(stream)
    return Trace(
        ids=tuple(tokens.rows()[0]),
        source_ids=None if source is None else tuple(source.rows()[0]),
        sublayers=tuple(sublayers),
        guesses=_guesses(model, streams, output.logits, tokens, top),
        weights=weights,
    )


@dataclasses.dataclass(frozen=True)
class _Update:
    """A residual update and the names of its intermediates."""

    stack: Literal["encoder", "decoder"]
    layer: int
    kind: str
    increment: str
    output: str
    weights: str | None
    last: bool

    def paths(self) -> list[str]:
        return [path for path in (self.increment, self.output, self.weights) if path is not None]


def _updates(model: Transformer) -> Iterator[_Update]:
    for name in ("encoder", "decoder"):
        stack: Stack | None = getattr(model, name)
        if stack is None:
            continue
        for i in range(stack.cfg.n_layers):
            owner = f"{name}.layers.{stack.cfg.owner(i)}"
            layer = stack.cfg.layer_at(i)
            if layer.residual != "sequential":
                paths = (f"{owner}.increment", f"{owner}.output", f"{owner}.attention.weights")
                yield _Update(name, i, "parallel", *paths, last=True)
                continue
            kinds = ["attention", *(["cross_attention"] if layer.cross_attention else []), "feed_forward"]
            for kind in kinds:
                reads = f"{owner}.{kind}.body.weights" if kind != "feed_forward" else None
                last = kind == "feed_forward"
                yield _Update(
                    name, i, kind, f"{owner}.{kind}.increment", f"{owner}.{kind}.output", reads, last
                )


def _main(model: Transformer) -> str:
    return "encoder" if model.decoder is None else "decoder"


def _sublayer(
    update: _Update, side: Tokens, stream: Tensor, increment: Tensor, weights: Tensor | None
) -> Sublayer:
    real = _real(side)
    entropy: tuple[float, ...] = ()
    if weights is not None:
        entropy = tuple(torch.special.entr(weights.double()).sum(-1).mean(-1).tolist())
    return Sublayer(
        update.stack,
        update.layer,
        update.kind,
        tuple(stream.shape),
        _rms(stream, real),
        _rms(increment, real),
        entropy,
    )


def _real(side: Tokens) -> Bool[Tensor, " length"]:
    return side.real_or_ones()[0]


def _rms(x: Float[Tensor, "1 length d_model"], real: Tensor) -> float:
    return x[0][real].double().square().mean().sqrt().item()


def _guesses(
    model: Transformer, streams: list[Tensor], logits: Tensor | None, tokens: Tokens, top: int
) -> tuple[tuple[tuple[Guess, ...], ...], ...]:
    head, stack = model.head, model.encoder if model.decoder is None else model.decoder
    if not isinstance(head, TokenHead) or logits is None or stack is None or top < 1:
        return ()
    real = _real(tokens)
    # The last layer's stream needs no lens: what follows it is the network itself.
    scores = [*(head(stack.final_norm(stream)) for stream in streams[:-1]), logits]
    return tuple(_top(layer[0][real], top) for layer in scores)


def _top(logits: Float[Tensor, "length vocab"], top: int) -> tuple[tuple[Guess, ...], ...]:
    best = logits.double().softmax(-1).topk(min(top, logits.shape[-1]), -1)
    return tuple(
        tuple(Guess(int(i), float(p)) for i, p in zip(ids, chances, strict=True))
        for ids, chances in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    )
