"""What a network is asked to do: how many tokens, in which mode, in which precision, on how many devices."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from isoform.config import Attention, ModelConfig, Stack
from isoform.errors import ConfigError, did_you_mean

Mode = Literal["train", "prefill", "decode"]
Shard = Literal["none", "ddp", "fsdp"]
Dtype = Literal["float64", "float32", "bfloat16", "float16", "bfloat16_autocast"]
Recomputation = Literal["none", "layer"]
Backend = Literal["auto", "eager", "sdpa", "flex"]
Device = Literal["cpu", "cuda"]
Optimizer = Literal["adamw", "adamw_master"]
Loss = Literal["cross_entropy", "chunked"]
Kernel = Literal["fused", "explicit", "composed"]

EAGER_UP_TO = 64  # positions up to which attention is written out on a CPU in training
FLEX_FROM = 2**20  # pairs from which on attention with a cap or a bias is fused on CUDA
CHUNK = 2**25  # scores over the vocabulary that a chunked loss holds at once
BYTES: dict[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True)
class Workload:
    """One step of work.

    Attributes:
        mode: ``train`` forward, backward and optimizer; ``prefill`` one forward pass over the whole input
            that fills the cache; ``decode`` one more token for each row, reading the cache.
        batch: rows B, over all devices.
        length: tokens T of the stream the head reads; in ``decode`` the tokens known so far, the new one
            included, which is how many keys it reads.
        source_length: source tokens S; only for an encoder–decoder.
        prefix_length: condition tokens of a prefix decoder (6.33); they see one another.
        dtype: what weights and activations are stored in. ``bfloat16_autocast`` keeps weights, gradients
            and optimizer in float32 and computes products in bfloat16.
        optimizer: ``adamw`` keeps two moments of each weight in the weight's dtype, as `torch.optim` does;
            ``adamw_master`` keeps them and a master copy of half-precision weights in float32.
        loss: ``cross_entropy`` over all logits at once, which the caller holds; ``chunked`` as `isoform
            train` has it: no log-probabilities, and beyond `CHUNK` scores piece by piece.
        recomputation: ``layer`` keeps only the input of each layer and runs it again in the backward pass.
        attention: as `Transformer.set_attention` takes it; see `kernel` for what comes of it.
        device: what kind of device; a few kernels keep less on CUDA than on CPU.
        devices: how many share the work; each takes ``ceil(batch / devices)`` rows.
        shard: ``ddp`` replicates everything, ``fsdp`` splits weights, gradients and optimizer state.
    """

    mode: Mode
    batch: int
    length: int
    source_length: int | None = None
    prefix_length: int = 0
    dtype: Dtype = "float32"
    optimizer: Optimizer = "adamw"
    loss: Loss = "cross_entropy"
    recomputation: Recomputation = "none"
    attention: Backend = "auto"
    device: Device = "cpu"
    devices: int = 1
    shard: Shard = "none"

    def __post_init__(self) -> None:
        for name, kind in (
            ("mode", Mode), ("dtype", Dtype), ("recomputation", Recomputation), ("attention", Backend),
            ("device", Device), ("shard", Shard), ("optimizer", Optimizer), ("loss", Loss),
        ):  # fmt: skip
            value, known = getattr(self, name), get_args(kind)
            if value not in known:
                raise ConfigError(f"{name}: {value!r} is not known{did_you_mean(str(value), known)}")
        for name in ("batch", "length", "source_length", "devices"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: {value} must be at least 1")
        if not 0 <= self.prefix_length <= self.length:
            raise ConfigError(
                f"prefix_length: {self.prefix_length} must lie between 0 and length {self.length}"
            )
        if self.devices > 1 and self.shard == "none":
            raise ConfigError(
                f"shard: 'none' leaves {self.devices} devices idle but one; choose 'ddp' or 'fsdp'"
            )
        if self.mode == "train" and self.dtype == "float16":
            raise ConfigError(
                "dtype: 'float16' cannot hold gradients without loss scaling; choose 'bfloat16'"
            )

    def kernel(self, attention: Attention, queries: int, keys: int) -> Kernel:
        """How an attention of so many queries and keys a row is computed (R28).

        ``fused``: one kernel that never stores the weights [B, h, T, S]. ``explicit``: scores and weights are
        tensors. ``composed``: the entry point for fused kernels, asked for by name, falls back to products
        that store them, as it does for a bias with a gradient, and on CPU for dropout. The choice under
        ``auto`` is that of `isoform.nn.Attention`, but for CPUs where `isoform.nn.exact` sends products
        elsewhere: there "auto" writes it out up to 255 positions, as ``eager`` does.
        """
        train, on_cpu = self.mode == "train", self.device == "cpu"
        capped, dropped = attention.softcap is not None, train and attention.dropout > 0
        trained = train and attention.positions.kind == "relative_buckets"
        if self.attention == "eager" or (self.attention == "sdpa" and capped):
            return "explicit"
        if self.attention == "sdpa":
            return "composed" if trained or (dropped and on_cpu) else "fused"
        if self.attention == "flex":
            return "fused"
        long = queries * keys >= FLEX_FROM
        if long and not (on_cpu or trained or dropped) and self._flexible(attention):
            return "fused"
        short = train and on_cpu and max(queries, keys) <= EAGER_UP_TO
        return "explicit" if capped or trained or short or (dropped and on_cpu) else "fused"

    def _flexible(self, attention: Attention) -> bool:
        width = attention.head_width
        return width >= 16 and width & (width - 1) == 0 and self.dtype != "float64"

    @property
    def rows(self) -> int:
        """Rows on the busiest device."""
        return -(-self.batch // self.devices)

    def check(self, config: ModelConfig) -> None:
        """Refuse work that this network cannot do.

        Raises:
            ConfigError: a missing or superfluous source length, decoding without a decoder, or a length
                beyond the learned positions.
        """
        if (config.source is not None) != (self.source_length is not None):
            raise ConfigError(
                "source_length: needed, the network is an encoder–decoder"
                if config.source is not None
                else "source_length: only an encoder–decoder has a source"
            )
        if self.mode == "decode" and config.decoder is None:
            raise ConfigError("mode: 'decode' needs a decoder; an encoder runs in one 'prefill' pass")
        if self.prefix_length and (config.decoder is None or config.decoder.visibility != "prefix"):
            raise ConfigError("prefix_length: only a decoder with visibility 'prefix' has one")
        for name, table, length in (
            ("length", config.embedding, self.length),
            ("source_length", config.source, self.source_length),
        ):
            if table is not None and length is not None and table.positions.kind == "learned":
                limit = table.positions.max_positions
                if length > limit:
                    raise ConfigError(f"{name}: {length} exceeds the {limit} learned positions")


def visible_pairs(stack: Stack, window: int | None, length: int, prefix: int = 0) -> int:
    """How many (query, key) pairs of one unpadded row are visible (6.32, 6.33, R21).

    A window w keeps i - w < j, and in a bidirectional stack j < i + w as well.
    """
    if stack.visibility == "bidirectional":
        return _both_ways(length, window)
    causal = _triangle(length, window)
    return causal + (prefix * (prefix - 1) // 2 if stack.visibility == "prefix" else 0)


def _triangle(length: int, window: int | None) -> int:
    width = length if window is None else min(window, length)
    return width * (width + 1) // 2 + (length - width) * width


def _both_ways(length: int, window: int | None) -> int:
    out = 0 if window is None else max(length - window, 0)
    return length * length - out * (out + 1)
