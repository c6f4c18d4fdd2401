"""The architecture that a CTranslate2 file holds: from the shapes and numbers in it (version 6)."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Literal

import torch
from torch import Tensor

from isoform.checkpoints.ctranslate2.binary import Variables
from isoform.checkpoints.ctranslate2.tensors import BUCKETS, ENCODINGS
from isoform.config import (
    ActivationName,
    Alibi,
    Attention,
    AttentionBias,
    Embedding,
    FeedForward,
    Gated,
    Layer,
    Learned,
    LinearScaling,
    ModelConfig,
    NoPositions,
    Norm,
    QKNorm,
    RelativeBuckets,
    Rotary,
    Sinusoidal,
    Stack,
    TokenHead,
    TwoLayer,
)
from isoform.config.parts import AddedPositions, AttentionPositions
from isoform.errors import ArtifactError
from isoform.nn.positions import Sinusoidal as SinusoidalModule

KINDS = ("TransformerSpec", "TransformerDecoderSpec")
# In the order of the engine's own numbers.
ACTIVATIONS: tuple[ActivationName, ...] = (
    "relu", "gelu_tanh", "silu", "gelu", "quick_gelu", "tanh", "sigmoid",
)  # fmt: skip
# Without a table the engine computes sin and cos of 10000^(-i/(d/2 - 1)), all sines first, from position 1.
BUILT_IN = Sinusoidal(
    layout="concatenated", spacing="half_width_minus_one", offset=1, base=10_000.0, precision="float32"
)
LINEAR = 0
# Of other outputs, of several source tables, and said again by the shapes.
UNREAD = (
    "decoder.alignment_layer", "decoder.alignment_heads", "encoder.embeddings_merge",
    "encoder.multi_query_attention",
)  # fmt: skip


def read_config(v: Variables, eps: float | None) -> ModelConfig:
    """The architecture.

    Args:
        v: the variables.
        eps: of every norm; None: the engine's own, 1e-5 for LayerNorm and 1e-6 for RMSNorm.

    Raises:
        ArtifactError: a part that is not understood.
    """
    both = v.kind == "TransformerSpec"
    decoder = _Side(v, "decoder", "decoder.embeddings", eps)
    encoder = _Side(v, "encoder", "encoder.embeddings_0", eps) if both else None
    tied = encoder is not None and v.same("encoder.embeddings_0.weight", "decoder.embeddings.weight")
    for name in UNREAD:
        v.setting(name, 0)
    for name in ("decoder.start_from_zero_embedding", "decoder.scale_alibi"):
        if v.setting(name, 0):
            raise ArtifactError(f"{v.where}: {name} is not supported")
    cap = v.setting("decoder.final_logit_softcapping", 0)
    scale = v.setting("decoder.scale_outputs", 1.0)
    head = TokenHead(
        tied=v.same("decoder.projection.weight", "decoder.embeddings.weight"),
        bias="decoder.projection.bias" in v.names(),
        scale="inverse_sqrt_d_model" if _near(scale, decoder.d**-0.5) else scale,
        softcap=cap or None,
    )
    target = decoder.embedding("shared" if tied or not both else "target")
    source = None if encoder is None else encoder.embedding("shared" if tied else "source")
    config = ModelConfig(
        d_model=decoder.d,
        embedding=target,
        source=source,
        tie_source=tied,
        encoder=None if encoder is None else encoder.stack(),
        decoder=decoder.stack(),
        head=head,
    )
    if left := v.unasked():
        raise ArtifactError(f"{v.where}: not understood, and possibly a change of the function: {left[0]}")
    return config


@dataclasses.dataclass(frozen=True)
class _Side:
    """One stack there."""

    v: Variables
    name: Literal["encoder", "decoder"]
    table: str
    eps: float | None

    @property
    def d(self) -> int:
        return self.v.shape(f"{self.table}.weight")[1]

    def has(self, name: str) -> bool:
        return f"{self.name}.{name}" in self.v.names()

    def embedding(self, vocabulary: str) -> Embedding:
        v, d = self.v, self.d
        scale = v.setting(f"{self.name}.scale_embeddings", 1)
        # A switch of one byte, or the factor itself.
        factor = d**0.5 if v.is_switch(f"{self.name}.scale_embeddings") and scale else float(scale or 1.0)
        return Embedding(
            vocabulary=vocabulary,
            vocab_size=v.shape(f"{self.table}.weight")[0],
            width=d,
            scale="sqrt_d_model" if _near(factor, d**0.5) else factor,
            positions=self._added(),
            norm=self._norm("layernorm_embedding") if self.has("layernorm_embedding.weight") else None,
        )

    def stack(self) -> Stack:
        n = next(i for i in itertools.count() if not self.has(f"layer_{i}.ffn.linear_0.weight"))
        if not n:
            raise ArtifactError(f"{self.v.where}: missing: {self.name}.layer_0.ffn.linear_0.weight")
        layers = [self._layer(i) for i in range(n)]
        if odd := [i for i, layer in enumerate(layers) if layer != layers[0]]:
            raise ArtifactError(
                f"{self.v.where}: {self.name}.layer_{odd[0]} is of another build than layer 0"
            )
        return Stack(
            n_layers=n,
            visibility="bidirectional" if self.name == "encoder" else "causal",
            layer=layers[0],
            final_norm=self._norm("layer_norm") if self.has("layer_norm.weight") else None,
        )

    def _layer(self, i: int) -> Layer:
        at = f"layer_{i}"
        pre = bool(self.v.setting(f"{self.name}.pre_norm", 1))
        crosses = self.has(f"{at}.attention.linear_0.weight")
        residual: Literal["sequential", "parallel", "parallel_shared_norm"] = "sequential"
        norms = [f"{part}.layer_norm" for part in ("self_attention", *["attention"] * crosses, "ffn")]
        if self.has(f"{at}.shared_layer_norm.weight"):
            residual, norms = "parallel_shared_norm", ["shared_layer_norm"]
        elif self.has(f"{at}.input_layer_norm.weight"):
            residual, norms = "parallel", ["input_layer_norm", "post_attention_layer_norm"]
        kinds = [self._norm(f"{at}.{name}") for name in norms]
        if any(kind != kinds[0] for kind in kinds):
            raise ArtifactError(f"{self.v.where}: the norms of {self.name}.{at} differ from each other")
        return Layer(
            placement="pre" if pre else "post",
            residual=residual,
            norm=kinds[0],
            attention=self._attention(f"{at}.self_attention", i, self_attention=True),
            cross_attention=self._attention(f"{at}.attention", i, self_attention=False) if crosses else None,
            feed_forward=self._network(f"{at}.ffn"),
        )

    def _norm(self, at: str) -> Norm:
        rms = not self.has(f"{at}.bias")
        offset = self.v.setting(f"{self.name}.{at}.layer_norm_use_residual", 0)
        eps = self.eps or (1e-6 if rms else 1e-5)
        return Norm(kind="rms" if rms else "layer", eps=eps, bias=not rms, gain_offset=float(bool(offset)))

    def _attention(self, at: str, i: int, *, self_attention: bool) -> Attention:
        v, full = self.v, f"{self.name}.{at}"
        heads = int(v.setting(f"{self.name}.num_heads", 8))
        width = int(v.setting(f"{full}.head_dim", self.d // heads))
        scale = v.setting(f"{full}.queries_scale", width**-0.5)
        inputs = self.has(f"{at}.linear_0.bias")
        qk_norm = None
        if self.has(f"{at}.q_norm.weight"):
            qk_norm = QKNorm(norm=self._norm(f"{at}.q_norm"), axis="head", order="before_rotation")
            self._norm(f"{at}.k_norm")
        return Attention(
            n_heads=heads,
            n_kv_heads=int(v.setting(f"{full}.num_heads_kv", heads)),
            head_width=width,
            scale="inverse_sqrt_head_width" if _near(scale, width**-0.5) else scale,
            bias=AttentionBias(
                query=inputs, key=inputs, value=inputs,
                output=self.has(f"{at}.linear_{1 if self_attention else 2}.bias"),
            ),
            positions=self._positions(full, i, width) if self_attention else NoPositions(),
            qk_norm=qk_norm,
        )  # fmt: skip

    def _positions(self, at: str, i: int, width: int) -> AttentionPositions:
        v = self.v
        alibi = v.setting(f"{self.name}.alibi", 0)
        positive = v.setting(f"{self.name}.alibi_use_positive_positions", 0)
        bias = BUCKETS.format(self.name, i)
        if bias in v.names():
            return RelativeBuckets(
                n_buckets=v.shape(bias)[0],
                max_distance=int(v.setting(f"{at}.relative_attention_max_distance", 128)),
                bidirectional=self.name == "encoder",
            )
        if alibi:
            return Alibi(rounding="float32" if positive else "none")
        if not v.has_setting(f"{at}.rotary_dim"):
            return NoPositions()
        factor = v.setting(f"{at}.rotary_scaling_factor", 1.0)
        kind = v.setting(f"{at}.rotary_scaling_type", -1)
        if kind not in (-1, LINEAR):
            raise ArtifactError(f"{v.where}: {at}.rotary_scaling_type {kind} is not supported")
        rotary = Rotary(
            layout="interleaved" if v.setting(f"{at}.rotary_interleave", 1) else "half",
            theta=v.setting(f"{at}.rotary_base", 10_000.0),
            width=int(v.setting(f"{at}.rotary_dim", 0)) or width,
            precision="float32",
        )
        return rotary if kind == -1 else rotary.replace(scaling=LinearScaling(factor=factor))

    def _network(self, at: str) -> FeedForward:
        number = int(self.v.setting(f"{self.name}.activation", 0))
        if not 0 <= number < len(ACTIVATIONS):
            raise ArtifactError(f"{self.v.where}: {self.name}.activation {number} is not supported")
        width = self.v.shape(f"{self.name}.{at}.linear_0.weight")[0]
        up, down = self.has(f"{at}.linear_0.bias"), self.has(f"{at}.linear_1.bias")
        if not self.has(f"{at}.linear_0_noact.weight"):
            return TwoLayer(width=width, activation=ACTIVATIONS[number], bias_up=up, bias_down=down)
        return Gated(
            width=width, activation=ACTIVATIONS[number], bias_gate=up, bias_down=down,
            bias_up=self.has(f"{at}.linear_0_noact.bias"),
        )  # fmt: skip

    def _added(self) -> AddedPositions:
        v, at = self.v, f"{self.name}.layer_0.self_attention"
        if (
            BUCKETS.format(self.name, 0) in v.names()
            or v.setting(f"{self.name}.alibi", 0)
            or v.has_setting(f"{at}.rotary_dim")
        ):
            return NoPositions()
        encodings = ENCODINGS.format(self.name)
        if encodings not in v.names():
            return BUILT_IN
        table = v.view(encodings)
        return recognised(table) or Learned(max_positions=table.shape[0], offset=0)


def sinusoids(cfg: Sinusoidal, rows: int, width: int) -> Tensor:
    """The table of the first positions, in float32."""
    return SinusoidalModule(cfg, width)(torch.arange(rows)[None], torch.float32)[0]


def recognised(table: Tensor) -> Sinusoidal | None:
    """Known sinusoids, if a table holds exactly these; else it was trained."""
    rows, width = table.shape
    for layout, spacing, offset, precision in itertools.product(
        ("concatenated", "interleaved"), ("half_width", "half_width_minus_one"), (0, 1, 2),
        ("float32", "float64_to_float32", "float64"),
    ):  # fmt: skip
        if spacing == "half_width_minus_one" and width < 4:
            continue
        cfg = Sinusoidal.model_validate({
            "layout": layout, "spacing": spacing, "offset": offset, "base": 10_000.0, "precision": precision,
        })  # fmt: skip
        if torch.equal(sinusoids(cfg, rows, width).to(table.dtype), table):
            return cfg
    return None


def _near(a: float, b: float) -> bool:
    """Equal as the format writes numbers, in float32."""
    return abs(a - b) <= 1e-6 * abs(b)
