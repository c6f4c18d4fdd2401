"""The golden probe: fixed inputs, and what the network made of them when it was saved (R38).

Inputs follow from the configuration alone. The network runs in evaluation mode and, where it is not too
large, in float64, so that the figures do not depend on the machine and a wrong constant shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from isoform.config import ModelConfig
from isoform.config.positions import BY_LENGTH
from isoform.config.protocol import Protocol
from isoform.errors import CheckError
from isoform.nn import Transformer, capture
from isoform.tokens import Tokens

SAMPLES = 6
TOP = 5
STEPS = 8
WIDE_BELOW = 2**26
TOLERANCE = {"float64": 1e-7, "float32": 1e-3, "bfloat16": 1e-1, "float16": 3e-2}
"""Largest difference accepted, relative to the largest magnitude of the same intermediate."""
TEXTS = ("Hello, world! 123", "Привет, мир", "你好，世界", "مرحبا")


@dataclasses.dataclass(frozen=True)
class ProbeReport:
    """What re-running the probe showed; figures are relative to the largest magnitude of what was compared.

    Attributes:
        precision: what the network was run in.
        tolerance: the largest difference accepted.
        layers: intermediates compared.
        worst_layer: the one that differed most, and by how much.
        logits: difference of the first-step scores; None without scores.
        tokens: greedy tokens that agreed; those after a near tie are not compared.
        texts: sample texts whose token ids agreed.
    """

    precision: str
    tolerance: float
    layers: int
    worst_layer: tuple[str, float]
    logits: float | None
    tokens: int
    texts: int

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ProbeReport:
        """From what `dataclasses.asdict` made of one, through JSON."""
        plain: dict[str, Any] = dict(data)
        name, difference = plain.pop("worst_layer")
        return cls(worst_layer=(name, difference), **plain)

    def lines(self) -> list[str]:
        """The figures in words."""
        name, difference = self.worst_layer
        worst = f"the largest difference is {difference:.1e}, at {name}" if difference else "bit for bit"
        out = [f"{self.layers} layers agree in {self.precision}: {worst}"]
        if self.logits is not None:
            out.append(f"first-step scores differ by {self.logits:.1e} (accepted: {self.tolerance:.0e})")
        if self.tokens:
            out.append(f"the first {self.tokens} greedy tokens agree")
        if self.texts:
            out.append(f"token ids of {self.texts} sample texts agree")
        return [*out, "sharing, shapes and positions agree"]


@torch.no_grad()
def record(model: Transformer, protocol: Protocol) -> dict[str, Any]:
    """Run the probe and write down what came out.

    Returns:
        Plain values: precision, a digest for every layer in order, first-step scores, greedy tokens and
        their margins, positions.
    """
    run = _Run(model)
    config = model.config
    tokens, source = inputs(config)
    with capture(model, "*.output") as seen:
        output = run(tokens, source)
    layers = {name: _digest(value, _side(name, tokens, source)) for name, value in seen.items()}
    for name in ("logits", "pooled"):
        value = getattr(output, name)
        if value is not None:
            layers[name] = _digest(value, tokens)
    result: dict[str, Any] = {
        "precision": run.precision,
        "lengths": tokens.lengths().tolist(),
        "positions": positions(config),
        "layers": layers,
        "logits": None,
        "greedy": None,
    }
    scores = output.logits if output.logits is not None else output.pooled
    if scores is not None:
        rows = torch.arange(tokens.batch, device=scores.device)
        first = scores[rows, tokens.lengths() - 1] if scores.dim() == 3 else scores
        top = first.topk(min(TOP, first.shape[-1]), -1)
        result["logits"] = {"ids": top.indices.tolist(), "values": top.values.double().tolist()}
    if config.head is not None and config.head.kind == "tokens" and config.decoder is not None:
        result["greedy"] = _greedy(run, config, protocol, tokens, source)
    return result


def compare(saved: Mapping[str, Any], found: Mapping[str, Any]) -> ProbeReport:
    """Hold a fresh run against the recorded one.

    Raises:
        CheckError: the first thing that differs, in the order positions, layers, scores, tokens; or a record
            that holds more or fewer numbers than a run does.
    """
    try:
        return _compared(saved, found)
    except (ValueError, IndexError):
        raise CheckError(
            "check: the recorded probe holds another count of numbers than a run gives"
        ) from None


def _compared(saved: Mapping[str, Any], found: Mapping[str, Any]) -> ProbeReport:
    for place, value in saved["positions"].items():
        if found["positions"].get(place) != value:
            raise CheckError(
                f"check: positions differ at {place}: saved with {value}, now {found['positions'].get(place)}"
            )
    # A network loaded in another type is held to what the coarser of the two can keep.
    tolerance = max(TOLERANCE[saved["precision"]], TOLERANCE[found["precision"]], found.get("rounding", 0.0))
    worst = ("", 0.0)
    for name, before in saved["layers"].items():
        after = found["layers"].get(name)
        if after is None:
            raise CheckError(f"check: {name} was recorded, but the network has no such layer")
        if after["shape"] != before["shape"]:
            raise CheckError(f"check: {name} has shape {after['shape']}, saved with {before['shape']}")
        difference = _difference(before, after)
        if not difference <= tolerance:
            raise CheckError(
                f"check: {name} is the first layer that differs, by {difference:.2g} of its largest value "
                f"(accepted: {tolerance:.0e})"
            )
        worst = max(worst, (name, difference), key=lambda pair: pair[1])
    logits = None
    if saved["logits"] is not None:
        logits = _scores(saved["logits"], found["logits"])
        if not logits <= tolerance:
            raise CheckError(f"check: first-step scores differ by {logits:.2g} (accepted: {tolerance:.0e})")
    tokens = 0
    if saved["greedy"] is not None:
        tokens = _tokens(saved["greedy"], found["greedy"], tolerance)
    return ProbeReport(found["precision"], tolerance, len(saved["layers"]), worst, logits, tokens, 0)


def positions(config: ModelConfig) -> dict[str, Any]:
    """Everything that decides positions, by where it is configured."""
    result: dict[str, Any] = {}
    for name in ("embedding", "source"):
        table = getattr(config, name)
        if table is not None:
            result[f"{name}.positions"] = table.positions.model_dump(mode="json")
    for name in ("encoder", "decoder"):
        stack = getattr(config, name)
        if stack is not None:
            kinds = [layer.attention.positions.model_dump(mode="json") for layer in stack.layers()]
            for i, kind in enumerate(kinds):
                if kind != kinds[i - 1] or i == 0:
                    result[f"{name}.layers.{i}.attention.positions"] = kind
    return result


def inputs(config: ModelConfig) -> tuple[Tokens, Tokens | None]:
    """Three rows of unequal length, padded on the right, and as many sources for an encoder–decoder."""
    length = _length(config)
    lengths = (length, max(1, length - length // 3), max(1, length // 4))
    tokens = _rows(config.embedding.vocab_size, lengths, 1)
    if config.embedding.n_token_types:
        steps = torch.arange(tokens.length).expand(tokens.batch, -1)
        types = steps * config.embedding.n_token_types // tokens.length
        tokens = dataclasses.replace(tokens, token_types=types)
    if config.stack.visibility == "prefix":
        tokens = dataclasses.replace(tokens, prefix=tokens.lengths() // 2)
    if config.source is None:
        return tokens, None
    return tokens, _rows(config.source.vocab_size, (lengths[2] + 1, lengths[0], lengths[1]), 2)


class _Run:
    """The network in evaluation mode, in the precision of the probe."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        parameters: dict[str, Tensor] = dict(model.named_parameters())
        dtype = next(iter(parameters.values())).dtype
        if sum(p.numel() for p in parameters.values()) < WIDE_BELOW and model_device(model).type != "mps":
            dtype = torch.float64
            parameters = {name: p.double() for name, p in parameters.items()}
        self.precision = str(dtype).removeprefix("torch.")
        self.parameters = parameters

    def __call__(self, tokens: Tokens, source: Tokens | None) -> Any:
        model, training = self.model, self.model.training
        device = model_device(model)
        moved = None if source is None else source.to(device)
        model.eval()
        try:
            return functional_call(model, self.parameters, (tokens.to(device), moved))
        finally:
            model.train(training)


def model_device(model: Transformer) -> torch.device:
    """Where the network's parameters are."""
    return next(model.parameters()).device


def _length(config: ModelConfig) -> int:
    windows = [
        layer.attention.window or 0
        for stack in (config.encoder, config.decoder)
        if stack is not None
        for layer in stack.layers()
    ]
    scaled = [r.scaling.original_length for r in config.rotaries() if isinstance(r.scaling, BY_LENGTH)]
    length = 12
    for bound in (*windows, *scaled):
        if bound <= 64:  # beyond a window and beyond the length that scaling starts at, where that is cheap
            length = max(length, bound + 4)
    return max(2, min(length, (config.max_positions() or length)))


def _rows(vocab_size: int, lengths: tuple[int, ...], seed: int) -> Tokens:
    state, rows = seed, list[list[int]]()
    for n in lengths:
        row: list[int] = []
        for _ in range(n):
            state = (state * 1103515245 + 12345) % 2**31
            row.append((state >> 8) % vocab_size)
        rows.append(row)
    return Tokens.from_lists(rows, pad_id=0)


def _side(name: str, tokens: Tokens, source: Tokens | None) -> Tokens:
    if source is not None and name.startswith(("encoder", "source_embedding")):
        return source
    return tokens


def _digest(value: Tensor, side: Tokens) -> dict[str, Any]:
    """Shape, moments over real places, their mean along a wave (no symmetry hides
    a change from it), and a few values spread over them.
    """
    shape = list(value.shape)
    if value.dim() >= 3:
        value = value[side.real_or_ones().to(value.device)]
    flat = value.double().reshape(-1)
    places = torch.linspace(0, flat.numel() - 1, SAMPLES, dtype=torch.float64).round().long()
    return {
        "shape": shape,
        "mean": flat.mean().item(),
        "std": flat.std(correction=0).item(),
        "max": flat.abs().max().item(),
        "wave": (flat * torch.arange(flat.numel(), device=flat.device).cos()).mean().item(),
        "samples": flat[places.to(flat.device)].tolist(),
    }


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> float:
    scale = max(before["max"], 1e-30)
    pairs = [(before[k], after[k]) for k in ("mean", "std", "max", "wave")]
    pairs += zip(before["samples"], after["samples"], strict=True)
    return _largest([a - b for a, b in pairs]) / scale


def _largest(values: list[float]) -> float:
    return max((abs(v) if v == v else float("inf") for v in values), default=0.0)


def _scores(before: Mapping[str, Any], after: Mapping[str, Any]) -> float:
    flat = [
        (a, b)
        for x, y in zip(before["values"], after["values"], strict=True)
        for a, b in zip(x, y, strict=True)
    ]
    scale = max(_largest([a for a, _ in flat]), 1e-30)
    return _largest([a - b for a, b in flat]) / scale


def _tokens(before: Mapping[str, Any], after: Mapping[str, Any], tolerance: float) -> int:
    for step, (a, b) in enumerate(zip(before["ids"], after["ids"], strict=True)):
        if before["margins"][step] <= 2 * tolerance:
            return step  # a near tie: either choice is right, and what follows depends on it
        if a != b:
            raise CheckError(f"check: greedy token {step + 1} is {b}, saved with {a}")
    return len(before["ids"])


def _greedy(
    run: _Run, config: ModelConfig, protocol: Protocol, tokens: Tokens, source: Tokens | None
) -> dict[str, Any]:
    """Tokens by full passes, one row; margin = (best - second) relative to the largest score."""
    if source is not None:
        source = source.select(torch.tensor([0]))
        ids = list(protocol.start) or [0]
    else:
        ids = tokens.rows()[2]
    prompt = len(ids)
    room = (config.max_positions() or prompt + STEPS) - prompt
    chosen: list[int] = []
    margins: list[float] = []
    for _ in range(min(STEPS, room + 1)):
        row = torch.tensor([ids])
        prefix = torch.tensor([prompt]) if config.stack.visibility == "prefix" else None
        scores = run(Tokens(row, prefix=prefix), source).logits[0, -1].double()
        top = scores.topk(min(2, scores.numel()))
        best = int(top.indices[0])
        margin = (top.values[0] - top.values[-1]).item() / max(scores.abs().max().item(), 1e-30)
        chosen.append(best)
        margins.append(margin)
        ids = [*ids, best]
    return {"ids": chosen, "margins": margins}


def rounding(model: Transformer, saved: str) -> float:
    """How far apart the probe may be when a network saved in one type is now held in another."""
    now = str(next(model.parameters()).dtype).removeprefix("torch.")
    return 0.0 if now == saved else max(TOLERANCE[now], TOLERANCE[saved])
