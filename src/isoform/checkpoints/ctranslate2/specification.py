"""A configuration as the engine's own specification classes, part by part."""

from __future__ import annotations

from typing import Any

from isoform.checkpoints.ctranslate2.structure import ACTIVATIONS
from isoform.config import (
    Alibi,
    Attention,
    Experts,
    Gated,
    LinearScaling,
    ModelConfig,
    Norm,
    NoScaling,
    QKNorm,
    RelativeBuckets,
    Rotary,
    Stack,
    TokenHead,
)
from isoform.errors import ArtifactError


def specification(library: Any, cfg: ModelConfig) -> Any:
    """The specification of a decoder or an encoder–decoder, without weights.

    Args:
        library: the `ctranslate2` package.
        cfg: the architecture.

    Raises:
        ArtifactError: a field that the format has no word for.
    """
    refuse(cfg)
    specs = library.specs.transformer_spec
    assert cfg.decoder is not None
    decoder = specs.TransformerDecoderSpec(
        with_encoder_attention=cfg.encoder is not None, **_arguments(library, cfg, cfg.decoder, decoder=True)
    )
    _numbers(decoder, cfg.decoder)
    decoder.scale_embeddings = _scale(cfg.embedding.scale, cfg.d_model)
    head = cfg.head
    assert isinstance(head, TokenHead)
    if head.scale != 1.0:
        decoder.scale_outputs = cfg.d_model**-0.5 if head.scale == "inverse_sqrt_d_model" else head.scale
    if head.softcap is not None:
        decoder.final_logit_softcapping = head.softcap
    if cfg.encoder is None:
        return specs.TransformerDecoderModelSpec(decoder)
    assert cfg.source is not None
    encoder = specs.TransformerEncoderSpec(**_arguments(library, cfg, cfg.encoder, decoder=False))
    _numbers(encoder, cfg.encoder)
    encoder.scale_embeddings = _scale(cfg.source.scale, cfg.d_model)
    return specs.TransformerSpec(encoder, decoder)


def _arguments(library: Any, cfg: ModelConfig, stack: Stack, *, decoder: bool) -> dict[str, Any]:
    """What the constructors of both sides take."""
    layer, table = stack.layer, cfg.embedding if decoder or cfg.source is None else cfg.source
    attention, network = layer.attention, layer.feed_forward
    assert not isinstance(network, Experts)
    activation = library.specs.common_spec.Activation(ACTIVATIONS.index(network.activation))
    result: dict[str, Any] = {
        "num_layers": stack.n_layers,
        "num_heads": attention.n_heads,
        "pre_norm": layer.placement == "pre",
        "no_final_norm": stack.final_norm is None,
        "activation": activation,
        "layernorm_embedding": table.norm is not None,
        "relative_attention_bias": isinstance(attention.positions, RelativeBuckets),
        "ffn_glu": isinstance(network, Gated),
        "rms_norm": layer.norm.kind == "rms",
        "num_heads_kv": None if attention.n_kv_heads == attention.n_heads else attention.n_kv_heads,
        "qk_norm": attention.qk_norm is not None,
    }
    if attention.n_heads * attention.head_width != cfg.d_model:
        result["head_dim"] = attention.head_width
    rotary = attention.positions
    if isinstance(rotary, Rotary):
        result |= {
            "rotary_dim": 0 if rotary.width == attention.head_width else rotary.width,
            "rotary_interleave": rotary.layout == "interleaved",
            "rotary_base": rotary.theta,
        }
        if isinstance(rotary.scaling, LinearScaling):
            result["rotary_scaling_type"] = library.specs.attention_spec.RotaryScalingType.Linear
            result["rotary_scaling_factor"] = rotary.scaling.factor
    if decoder:
        result["parallel_residual"] = layer.residual != "sequential"
        result["shared_layer_norm"] = layer.residual == "parallel_shared_norm"
        result["alibi"] = isinstance(rotary, Alibi)
        result["alibi_use_positive_positions"] = isinstance(rotary, Alibi) and rotary.rounding == "float32"
    return result


def _numbers(side: Any, stack: Stack) -> None:
    """What is not an argument of the constructors."""
    import numpy as np

    layer = stack.layer
    for spec in side.layer:
        pairs = [(spec.self_attention, layer.attention)]
        if layer.cross_attention is not None:
            pairs.append((spec.attention, layer.cross_attention))
        for part, attention in pairs:
            if attention.scale != "inverse_sqrt_head_width":
                part.queries_scale = float(attention.scale)
        buckets = layer.attention.positions
        if isinstance(buckets, RelativeBuckets):
            spec.self_attention.relative_attention_max_distance = np.dtype("int32").type(buckets.max_distance)


def _scale(scale: Any, d_model: int) -> Any:
    """True stands for the root of the width, a number for itself."""
    return float(d_model**0.5) if scale == "sqrt_d_model" else float(scale)


def refuse(cfg: ModelConfig) -> None:
    """Say what the format cannot express.

    Raises:
        ArtifactError: the first such field, and why.
    """
    for field, reason in _reasons(cfg):
        raise ArtifactError(f"the ctranslate2 format cannot say this configuration: {field}: {reason}")


def _reasons(cfg: ModelConfig) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if cfg.structure == "encoder":
        found.append(("encoder", "written are decoders and encoder–decoders"))
        return found
    head = cfg.head
    if not isinstance(head, TokenHead) or head.transform is not None:
        found.append(("head", "it has scores over tokens, without a transform before them"))
    for name, table in (("embedding", cfg.embedding), ("source", cfg.source)):
        if table is None:
            continue
        if table.projection is not None:
            found.append((f"{name}.projection", "tables have the width of the model"))
        if table.n_token_types:
            found.append((f"{name}.n_token_types", "it has no token types"))
    for name, stack in (("encoder", cfg.encoder), ("decoder", cfg.decoder)):
        if stack is not None:
            table = cfg.source if name == "encoder" else cfg.embedding
            assert table is not None
            found += [(f"{name}.{field}", reason) for field, reason in _of_stack(stack, table.positions.kind)]
    return found


def _of_stack(stack: Stack, added: str) -> list[tuple[str, str]]:
    layer, found = stack.layer, list[tuple[str, str]]()
    if stack.visibility == "prefix":
        found.append(("visibility", "a decoder is causal"))
    if stack.variants:
        found.append(("variants", "all layers are of one build"))
    if stack.layer_sharing is not None:
        found.append(("layer_sharing", "every layer has parameters of its own"))
    if layer.placement not in ("pre", "post"):
        found.append(("layer.placement", f"{layer.placement!r} is not one of pre, post"))
    if layer.placement == "post" and stack.final_norm is not None:
        found.append(("final_norm", "there is none after norms in post placement"))
    if layer.residual_source != "input":
        found.append(("layer.residual_source", "increments are added to the stream itself"))
    if layer.residual_scale != 1.0:
        found.append(("layer.residual_scale", "increments are added as they are"))
    if layer.memory_norm is not None:
        found.append(("layer.memory_norm", "the memory is read as it is"))
    found += [(f"layer.norm.{field}", reason) for field, reason in _of_norm(layer.norm)]
    if layer.residual != "sequential" and layer.norm.kind == "rms":
        found.append(("layer.norm.kind", "parallel sublayers have LayerNorm"))
    network = layer.feed_forward
    if isinstance(network, Experts):
        found.append(("layer.feed_forward.kind", "it has no experts"))
    elif network.activation not in ACTIVATIONS:
        found.append(
            (
                "layer.feed_forward.activation",
                f"{network.activation!r} is not one of {', '.join(ACTIVATIONS)}",
            )
        )
    found += [(f"layer.attention.{field}", reason) for field, reason in _of_attention(layer.attention)]
    if (layer.attention.positions.kind == "none") != (added != "none"):
        found.append(
            (
                "layer.attention.positions",
                "positions are added to the embedding or known to attention, not both",
            )
            if added != "none"
            else ("layer.attention.positions", "the engine adds positions of its own where there are none")
        )
    cross = layer.cross_attention
    if cross is not None:
        found += [(f"layer.cross_attention.{field}", reason) for field, reason in _of_attention(cross)]
        for field in ("n_heads", "n_kv_heads", "head_width", "qk_norm"):
            if getattr(cross, field) != getattr(layer.attention, field):
                found.append((f"layer.cross_attention.{field}", "it is that of self-attention"))
    return found


def _of_norm(norm: Norm) -> list[tuple[str, str]]:
    if not norm.gain or (norm.kind == "layer" and not norm.bias):
        return [("gain" if not norm.gain else "bias", "norms have a gain, LayerNorm a bias too")]
    if norm.kind == "layer" and norm.gain_offset:
        return [("gain_offset", "only RMSNorm can have it")]
    return []


def _of_attention(attention: Attention) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    bias, positions = attention.bias, attention.positions
    if attention.softcap is not None:
        found.append(("softcap", "scores are not capped"))
    if attention.window is not None:
        found.append(("window", "its window cuts the cache, which is another function"))
    if not bias.query == bias.key == bias.value:
        found.append(("bias", "query, key and value have biases together or not at all"))
    if attention.qk_norm is not None:
        found += _of_qk_norm(attention.qk_norm)
    if isinstance(positions, Rotary) and not isinstance(positions.scaling, NoScaling | LinearScaling):
        found.append(("positions.scaling", f"{positions.scaling.kind} is not one of none, linear"))
    if isinstance(positions, Rotary) and positions.precision != "float32":
        found.append(("positions.precision", "angles are computed in float32"))
    if isinstance(positions, Alibi) and (positions.factor != 1.0 or positions.rounding == "bfloat16"):
        found.append(("positions", "alibi is added unscaled, in float32"))
    return found


def _of_qk_norm(norm: QKNorm) -> list[tuple[str, str]]:
    if norm.axis != "head" or norm.order != "before_rotation" or norm.norm.kind != "rms":
        return [("qk_norm", "queries and keys have an RMSNorm a head, before the rotation")]
    return []
