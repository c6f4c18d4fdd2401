"""`torch.nn.Transformer` and its stacks as modules: weights in, weights out (R40).

These modules have neither embeddings nor a head: they read and give vectors. So the counterpart of one here
is the stacks of a network whose embedding and head are the caller's; `from_torch` fills the stacks of a
network, `to_torch` makes a module of them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from isoform.config import Attention, Embedding, Layer, ModelConfig, NoPositions, Norm, Stack, TwoLayer
from isoform.config.parts import ActivationName
from isoform.config.presets.build import attention, two_layer
from isoform.errors import ArtifactError
from isoform.nn import Transformer

# A function and not nn.GELU: decoder layers that are copied forget an activation that is a module.
GELU_TANH = functools.partial(F.gelu, approximate="tanh")
Module = nn.Transformer | nn.TransformerEncoder


@dataclasses.dataclass(frozen=True)
class _Side:
    """One stack there: its layers and the norm at its end."""

    layers: list[Any]
    norm: Any


def from_torch(module: Module, *, vocab_size: int = 1) -> Transformer:
    """A network of the same function between the first and the last hidden states.

    Args:
        module: `nn.Transformer` or `nn.TransformerEncoder`.
        vocab_size: rows of the embedding that the network gets here, which the module lacks; its values are
            freshly drawn and it has no positions. Feed the stacks directly to leave it out.

    Raises:
        ArtifactError: layers that differ from each other, or a part that is not torch's own.
    """
    sides = _sides(module)
    config = _config(sides, vocab_size)
    from isoform.nn import build

    model = build(config, seed=0)
    first = next(module.parameters())
    model.to(device=first.device, dtype=first.dtype)
    with torch.no_grad():
        for name, side in sides.items():
            stack = model.get_submodule(name)
            for ours, theirs in zip(stack.layers, side.layers, strict=True):  # pyright: ignore
                for mine, other in _pairs(ours, theirs, cross=len(sides) == 2 and name == "decoder"):
                    _copy(mine, other)
            if side.norm is not None:
                _copy_parameters(stack.final_norm, side.norm)
    return model.train(module.training)


def to_torch(model: Transformer) -> Module:
    """The module of the network's stacks.

    Raises:
        ArtifactError: a configuration that the module cannot express, with the field.
    """
    module = make(model.config)
    sides = _sides(module)
    first = next(model.parameters())
    module.to(device=first.device, dtype=first.dtype)
    with torch.no_grad():
        for name, side in sides.items():
            stack = model.get_submodule(name)
            for ours, theirs in zip(stack.layers, side.layers, strict=True):  # pyright: ignore
                cross = getattr(theirs, "multihead_attn", None) is not None
                for mine, other in _pairs(ours, theirs, cross=cross):
                    _copy(other, mine)
            if side.norm is not None:
                _copy_parameters(side.norm, stack.final_norm)
    return module.train(model.training)


def make(cfg: ModelConfig) -> Module:
    """The module of a configuration's stacks, with values of its own.

    Raises:
        ArtifactError: a configuration that the module cannot express, with the field.
    """
    _expressible(cfg)
    sides: dict[str, Any] = {}
    for name, stack in (("encoder", cfg.encoder), ("decoder", cfg.decoder)):
        if stack is not None:
            sides[name] = _make(stack, cfg.d_model, cross=stack.layer.cross_attention is not None)
    if len(sides) == 1:
        return sides["encoder"]
    return nn.Transformer(
        cfg.d_model, cfg.stack.layer.attention.n_heads, custom_encoder=sides["encoder"],
        custom_decoder=sides["decoder"], batch_first=True,
    )  # fmt: skip


def _sides(module: nn.Module) -> dict[str, _Side]:
    if isinstance(module, nn.Transformer):
        return {
            "encoder": _Side(list(module.encoder.layers), module.encoder.norm),
            "decoder": _Side(list(module.decoder.layers), module.decoder.norm),
        }
    if isinstance(module, nn.TransformerEncoder):
        return {"encoder": _Side(list(module.layers), module.norm)}
    if isinstance(module, nn.TransformerDecoder):
        raise ArtifactError(
            "TransformerDecoder cannot stand alone: it reads a memory; pass its nn.Transformer"
        )
    raise ArtifactError(f"{type(module).__name__}: expected nn.Transformer or nn.TransformerEncoder")


def _config(sides: dict[str, _Side], vocab_size: int) -> ModelConfig:
    first = sides["encoder"].layers[0]
    d = first.linear1.in_features
    table = Embedding(vocabulary="shared", vocab_size=vocab_size, width=d, positions=NoPositions())
    both = "decoder" in sides
    return ModelConfig(
        d_model=d,
        embedding=table,
        source=table if both else None,
        tie_source=both,
        encoder=_stack(sides["encoder"], "bidirectional"),
        decoder=_stack(sides["decoder"], "causal") if both else None,
        head=None,
    )


def _stack(side: _Side, visibility: Any) -> Stack:
    kinds = [_layer(layer) for layer in side.layers]
    if any(kind != kinds[0] for kind in kinds):
        raise ArtifactError("the layers of one stack differ from each other")
    final = None if side.norm is None else _norm(side.norm)
    return Stack(n_layers=len(kinds), visibility=visibility, layer=kinds[0], final_norm=final)


def _layer(layer: Any) -> Layer:
    decoder = isinstance(layer, nn.TransformerDecoderLayer)
    reads = _attention(layer.self_attn)
    norms = [_norm(layer.norm1), _norm(layer.norm2)]
    rates = {layer.dropout1.p, layer.dropout2.p}
    if decoder:
        norms.append(_norm(layer.norm3))
        rates.add(layer.dropout3.p)
    if any(norm != norms[0] for norm in norms) or len(rates) > 1:
        raise ArtifactError("the norms or dropouts of one layer differ from each other")
    return Layer(
        placement="pre" if layer.norm_first else "post",
        residual="sequential",
        norm=norms[0],
        attention=reads,
        cross_attention=_attention(layer.multihead_attn) if decoder else None,
        feed_forward=two_layer(
            layer.linear1.out_features,
            _activation(layer.activation),
            bias=layer.linear1.bias is not None,
            dropout=layer.dropout.p,
        ),
        residual_dropout=rates.pop(),
    )


def _attention(module: Any) -> Attention:
    if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
        raise ArtifactError(
            "MultiheadAttention with kdim, vdim, add_bias_kv or add_zero_attn is not supported"
        )
    return attention(
        module.embed_dim, module.num_heads, bias=module.in_proj_bias is not None, dropout=module.dropout
    )


def _norm(module: Any) -> Norm:
    if not isinstance(module, nn.LayerNorm):
        raise ArtifactError(f"norm {type(module).__name__} is not supported; expected LayerNorm")
    parts: Any = module
    return Norm(kind="layer", eps=parts.eps, gain=parts.weight is not None, bias=parts.bias is not None)


def _activation(function: Any) -> ActivationName:
    if function is F.relu or isinstance(function, nn.ReLU):
        return "relu"
    if function is F.gelu:
        return "gelu"
    if isinstance(function, nn.GELU):
        return "gelu" if function.approximate == "none" else "gelu_tanh"
    if isinstance(function, functools.partial):
        partial: functools.partial[Any] = function
        if partial.func is F.gelu and not partial.args and partial.keywords == GELU_TANH.keywords:
            return "gelu_tanh"
    if function is F.silu or isinstance(function, nn.SiLU):
        return "silu"
    raise ArtifactError(f"activation {function!r} is not supported; known: relu, gelu, silu")


def _make(stack: Stack, d_model: int, *, cross: bool) -> Any:
    layer = stack.layer
    network, norm = layer.feed_forward, layer.norm
    assert isinstance(network, TwoLayer)
    functions: dict[ActivationName, Any] = {
        "relu": F.relu, "gelu": F.gelu, "gelu_tanh": GELU_TANH, "silu": F.silu,
    }  # fmt: skip
    kind = nn.TransformerDecoderLayer if cross else nn.TransformerEncoderLayer
    made = kind(
        d_model, layer.attention.n_heads, network.width, 0.0, functions[network.activation], norm.eps,
        batch_first=True, norm_first=layer.placement == "pre", bias=network.bias_up,
    )  # fmt: skip
    final = None
    if stack.final_norm is not None:
        final = nn.LayerNorm(d_model, stack.final_norm.eps, bias=stack.final_norm.bias)
    if cross:
        result: Any = nn.TransformerDecoder(made, stack.n_layers, final)  # pyright: ignore[reportArgumentType]
    else:
        result = nn.TransformerEncoder(made, stack.n_layers, final, enable_nested_tensor=False)  # pyright: ignore
    for each in result.layers:
        each.dropout.p = network.dropout
        each.self_attn.dropout = layer.attention.dropout
        for name in ("dropout1", "dropout2", "dropout3"):
            if hasattr(each, name):
                getattr(each, name).p = layer.residual_dropout
        if cross:
            assert layer.cross_attention is not None
            each.multihead_attn.dropout = layer.cross_attention.dropout
    return result


def _expressible(cfg: ModelConfig) -> None:
    """Compare with the configuration that would be read back from the module."""
    from isoform.config import difference

    for name, stack in (("encoder", cfg.encoder), ("decoder", cfg.decoder)):
        if stack is None:
            continue
        layer = stack.layer
        wanted = isinstance(layer.feed_forward, TwoLayer) and layer.feed_forward.activation in (
            "relu", "gelu", "gelu_tanh", "silu",
        )  # fmt: skip
        if not wanted:
            raise ArtifactError(f"torch.nn.Transformer cannot say {name}.layer.feed_forward")
        if name == "decoder" and layer.cross_attention is None:
            raise ArtifactError("torch.nn.Transformer has no decoder without cross-attention")
        if cfg.d_model != layer.attention.n_heads * layer.attention.head_width:
            raise ArtifactError(f"torch.nn.Transformer cannot say {name}.layer.attention.head_width")
        with torch.device("meta"):
            made = _make(stack, cfg.d_model, cross=layer.cross_attention is not None)
        back = _stack(_Side(list(made.layers), made.norm), stack.visibility)
        if found := difference(back, stack):
            raise ArtifactError(f"torch.nn.Transformer cannot say {name}.{found[0].path} = {found[0].b!r}")


def _pairs(ours: Any, theirs: Any, *, cross: bool) -> list[tuple[Any, Any]]:
    """Parts that correspond, ours and theirs."""
    decoder = getattr(theirs, "multihead_attn", None) is not None
    last = "norm3" if decoder else "norm2"
    place = "before" if theirs.norm_first else "after_sum"
    pairs: list[tuple[Any, Any]] = [
        (ours.attention.body, theirs.self_attn),
        (getattr(ours.attention, place), theirs.norm1),
        (ours.feed_forward.body.up, theirs.linear1),
        (ours.feed_forward.body.down, theirs.linear2),
        (getattr(ours.feed_forward, place), getattr(theirs, last)),
    ]
    if cross:
        pairs += [
            (ours.cross_attention.body, theirs.multihead_attn),
            (getattr(ours.cross_attention, place), theirs.norm2),
        ]
    return pairs


def _copy(target: Any, source: Any) -> None:
    """Copy one part, in either direction."""
    if isinstance(source, nn.MultiheadAttention):
        _copy_attention(source, target, to_ours=True)
    elif isinstance(target, nn.MultiheadAttention):
        _copy_attention(target, source, to_ours=False)
    else:
        _copy_parameters(target, source)


def _copy_parameters(target: Any, source: Any) -> None:
    for name in ("weight", "bias"):
        if getattr(target, name, None) is not None:
            getattr(target, name).copy_(getattr(source, name))


def _copy_attention(theirs: Any, ours: Any, *, to_ours: bool) -> None:
    packed = [ours.query, ours.key_value] if ours.cross else [ours.qkv]
    for name in ("weight", "bias"):
        parts = [getattr(module, name) for module in packed]
        whole = getattr(theirs, f"in_proj_{name}")
        if whole is None:
            continue
        if to_ours:
            for part, value in zip(parts, whole.split([p.shape[0] for p in parts]), strict=True):
                part.copy_(value)
        else:
            whole.copy_(torch.cat(parts))
    pair = (ours.output, theirs.out_proj) if to_ours else (theirs.out_proj, ours.output)
    _copy(*pair)
