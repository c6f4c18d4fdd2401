"""Memory in closed form: weights, gradients, optimizer, activations, key-value cache, logits (R28).

The peak of a training step is found by walking the tape: the forward pass adds up what each block stores,
the backward pass takes it away from the end while gradients of weights come in, and the fullest of all
moments is the peak. It is held against `isoform.cost.counters.measure_memory`, which follows every tensor
storage of a real step: AdamW past its first step, ``zero_grad(set_to_none=True)``, mean cross-entropy over
logits that the caller holds. Counted are tensors; what allocators round up, scratch space inside kernels and
PyTorch itself come on top.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from isoform.config import ModelConfig
from isoform.cost.groups import ranges
from isoform.cost.parameters import parameters
from isoform.cost.storage import Stored, Widths, stored_bytes
from isoform.cost.tape import Step, tape
from isoform.cost.workload import Workload

_LOGITS = ("head", "loss")


@dataclasses.dataclass(frozen=True)
class ComponentMemory:
    """What one component stores for the backward pass.

    Attributes:
        name: dotted; equal layers together, ``decoder.layers.0-11.attention``.
        uses: how many times it occurs.
        bytes: of all occurrences.
        tensors: what one occurrence stores, with its closed form.
    """

    name: str
    uses: int
    bytes: int
    tensors: tuple[Stored, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with stable keys."""
        tensors = [tensor.to_dict() for tensor in self.tensors]
        return {"name": self.name, "uses": self.uses, "bytes": self.bytes, "tensors": tensors}


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on the busiest device.

    Attributes:
        weights: parameters.
        gradients: of all parameters; none without training.
        optimizer: AdamW's two moments, and master weights where there are any.
        activations: what the whole forward pass stores for the backward pass, logits apart.
        logits: scores over the vocabulary and, in training, their log-probabilities.
        kv_cache: keys and values of all layers, and of the source where there is one.
        transient: what is alive at the peak beside the above that is alive then.
        peak: the most that is alive at once.
        peak_at: the component at whose forward or backward pass that is.
        components: the activations in detail.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    kv_cache: int
    transient: int
    peak: int
    peak_at: str
    components: tuple[ComponentMemory, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with stable keys."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data["components"] = [component.to_dict() for component in self.components]
        return data


def memory(config: ModelConfig, work: Workload) -> Memory:
    """Reckon the memory of one step from the configuration alone.

    Raises:
        ConfigError: work that this network cannot do.
    """
    work.check(config)
    widths = Widths.of(work)
    elements = parameters(config).total
    split = work.devices if work.shard == "fsdp" else 1
    weights = -(-elements // split) * widths.weight
    steps = tape(config, work)
    if work.mode != "train":
        return _inference(config, work, widths, steps, weights)
    states = 3 if work.optimizer == "adamw_master" and widths.weight < 4 else 2
    optimizer = -(-elements // split) * widths.state * states
    fixed = weights + optimizer
    gathered, reduced = _gathered(steps, widths, work)
    kept, peak, at = _walk(steps, work, widths, split, fixed, gathered, reduced)
    logits = sum(step.block.kept_bytes for step in steps if step.path in _LOGITS)
    return Memory(
        weights=weights,
        gradients=weights,
        optimizer=optimizer,
        activations=kept - logits,
        logits=logits,
        kv_cache=0,
        transient=max(0, peak - fixed - kept),
        peak=peak,
        peak_at=at,
        components=_components(steps, work),
    )


def kv_cache(config: ModelConfig, work: Workload) -> int:
    """Bytes of the cache for ``work.length`` tokens a row, as `isoform.nn.Cache` allocates it.

    Every decoder layer has room for all tokens, also under a window. Beside it stand the projected keys and
    values of the source. An encoder has none.
    """
    if config.decoder is None:
        return 0
    width = Widths.of(work).compute
    total = 0
    for layer in config.decoder.layers():
        own, across = layer.attention, layer.cross_attention
        total += work.length * own.n_kv_heads * own.head_width
        if across is not None and work.source_length is not None:
            total += work.source_length * across.n_kv_heads * across.head_width
    return 2 * work.rows * total * width


def _inference(
    config: ModelConfig, work: Workload, widths: Widths, steps: list[Step], weights: int
) -> Memory:
    cache = kv_cache(config, work)
    gathered, _ = _gathered(steps, widths, work)
    lasting = 0
    peak, at = 0, ""
    for step in steps:
        # Nothing is stored for a backward pass; tables and the source's states last to the end.
        if step.block.name in ("shared", "memory"):
            lasting += step.block.kept_bytes
        alive = lasting + stored_bytes(step.block.forward)
        if alive > peak:
            peak, at = alive, step.path
    logits = sum(stored_bytes(step.block.forward) for step in steps if step.path == "head")
    return Memory(
        weights=weights,
        gradients=0,
        optimizer=0,
        activations=0,
        logits=logits,
        kv_cache=cache,
        transient=peak + gathered,
        peak=weights + cache + peak + gathered,
        peak_at=at,
        components=(),
    )


def _walk(
    steps: list[Step], work: Workload, widths: Widths, split: int, fixed: int, gathered: int, reduced: int
) -> tuple[int, int, str]:
    """What the forward pass stores, and the fullest moment with its place."""
    segments = _segments(steps)
    recompute = work.recomputation == "layer"
    stored = [_segment_bytes(segment, recompute) for segment in segments]
    kept, peak, at = sum(stored), 0, ""
    before = 0
    for segment, bytes_ in zip(segments, stored, strict=True):
        own = 0
        for step in segment:
            for moment in step.block.working:
                alive = before + own + step.block.moment_bytes(moment, 0)
                if alive > peak:
                    peak, at = alive, step.path
            own += step.block.kept_bytes
        before += bytes_
    peak = max(peak, kept) + fixed + gathered
    gradients, before = 0, kept
    for segment, bytes_ in zip(reversed(segments), reversed(stored), strict=True):
        before -= bytes_
        own = sum(step.block.kept_bytes for step in segment)
        for step in reversed(segment):
            own -= step.block.kept_bytes
            for moment in step.block.backward:
                alive = fixed + gathered + reduced + before + own + gradients
                alive += step.block.moment_bytes(moment, widths.weight)
                if alive > peak:
                    peak, at = alive, step.path
            if step.begins:
                gradients += step.block.weights * widths.weight // split
    if fixed + gradients > peak:
        peak, at = fixed + gradients, "optimizer"
    return kept, peak, at


def _segments(steps: list[Step]) -> list[list[Step]]:
    """The blocks of each layer together, all others alone."""
    segments: list[list[Step]] = []
    for step in steps:
        if step.layer is not None and segments and segments[-1][0].name == step.name:
            segments[-1].append(step)
        else:
            segments.append([step])
    return segments


def _segment_bytes(segment: list[Step], recompute: bool) -> int:
    layer = segment[0].layer
    if recompute and layer is not None:
        return layer.bytes
    return sum(step.block.kept_bytes for step in segment)


def _gathered(steps: list[Step], widths: Widths, work: Workload) -> tuple[int, int]:
    """Weights and gradients that fully sharded training has whole for a while.

    The layer at work and the next one, fetched ahead; and what belongs to no layer, kept from its first use
    to the end. Gradients are whole until they are reduced, one layer at a time.
    """
    if work.shard != "fsdp":
        return 0, 0
    layers: dict[str, int] = {}
    root = 0
    for step in steps:
        if step.layer is not None:
            layers[step.name] = layers.get(step.name, 0) + step.block.weights
        else:
            root += step.block.weights
    largest = max(layers.values(), default=0)
    return (root + 2 * largest) * widths.compute, largest * widths.weight


def _components(steps: list[Step], work: Workload) -> tuple[ComponentMemory, ...]:
    """Equal blocks of several layers as one component; under recomputation only the layers' inputs."""
    groups: dict[tuple[str, ...], list[Step]] = {}
    for step in steps:
        stack = step.name.split(".")[0]
        if step.layer is None:
            groups[(step.path,)] = [step]
        elif work.recomputation == "layer":
            groups.setdefault((stack, "input"), []).append(step)
        else:
            groups.setdefault((stack, str(id(step.block))), []).append(step)
    found: list[ComponentMemory] = []
    for key, members in groups.items():
        first = members[0]
        names = dict.fromkeys(step.name for step in members)
        kept, name = first.block.kept, first.path
        if first.layer is not None:
            kept = (first.layer,) if key[1] == "input" else kept
            indices = ranges(tuple(int(layer.rsplit(".", 1)[1]) for layer in names))
            name = f"{key[0]}.layers.{indices}.{'input' if key[1] == 'input' else first.block.name}"
        if kept:
            found.append(ComponentMemory(name, len(names), len(names) * stored_bytes(kept), kept))
    return tuple(found)
