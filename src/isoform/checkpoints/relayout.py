"""The same function in the other rotary layout: rows of query and key projections put in another order.

Turning channels (2i, 2i + 1) or (i, i + width/2) by one angle is the same map on permuted channels; scores
are sums over channels, so a permutation common to queries and keys changes nothing.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from isoform import config
from isoform.checkpoints.operations import interleaved_to_half
from isoform.checkpoints.weights import fill, skeleton, stored_names
from isoform.config import ModelConfig
from isoform.nn import Attention, Transformer


def with_layout(model: Transformer, layout: Literal["half", "interleaved"]) -> Transformer:
    """A network of the same function whose rotary embeddings have the given layout.

    Parameters that need no rearranging are shared with the given network.
    """
    cfg = _config(model.config, layout)
    if cfg == model.config:
        return model
    changed: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if isinstance(module, Attention) and isinstance(module.cfg.positions, config.Rotary):
            changed.update(_rearranged(path, module, layout))
    parameters = dict(model.named_parameters())
    result = skeleton(cfg)
    fill(
        result,
        ((name, changed.get(name, parameters[name].detach())) for name in stored_names(result)),
    )
    return result.train(model.training)


def _rearranged(path: str, module: Attention, layout: str) -> dict[str, Tensor]:
    cfg, rotary = module.cfg, module.cfg.positions
    assert isinstance(rotary, config.Rotary)
    if rotary.layout == layout:
        return {}

    def order(heads: int) -> Tensor:
        rows = torch.tensor(interleaved_to_half(heads, cfg.head_width, rotary.width))
        return rows if layout == "half" else rows.argsort()

    moved = {"query": order(cfg.n_heads), "key": order(cfg.n_kv_heads)}
    packed = module.qkv
    weights = [packed.part(n)[moved[n]] if n in moved else packed.part(n) for n in packed.parts]
    result = {f"{path}.qkv.weight": torch.cat(weights).detach()}
    biases: list[Tensor] = []
    for name in packed.biased:
        bias = packed.part_bias(name)
        assert bias is not None
        biases.append(bias[moved[name]] if name in moved else bias)
    if biases:
        result[f"{path}.qkv.bias"] = torch.cat(biases).detach()
    for name, norm, heads in (
        ("query_norm", module.query_norm, cfg.n_heads),
        ("key_norm", module.key_norm, cfg.n_kv_heads),
    ):
        per_head = cfg.qk_norm is not None and cfg.qk_norm.axis == "head"
        rows = order(1 if per_head else heads)
        for kind, parameter in norm.named_parameters():
            result[f"{path}.{name}.{kind}"] = parameter.detach()[rows]
    return result


def _config(cfg: ModelConfig, layout: str) -> ModelConfig:
    def turned(attention: config.Attention) -> config.Attention:
        if isinstance(attention.positions, config.Rotary):
            return attention.replace(positions__layout=layout)
        return attention

    changes: dict[str, config.Stack] = {}
    for side in ("encoder", "decoder"):
        stack: config.Stack | None = getattr(cfg, side)
        if stack is None:
            continue
        variants = tuple(
            v if v.attention is None else v.replace(attention=turned(v.attention)) for v in stack.variants
        )
        changes[side] = stack.replace(layer__attention=turned(stack.layer.attention), variants=variants)
    return cfg.replace(**changes)
