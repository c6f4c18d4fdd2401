"""First values of the parameters."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from isoform.config import ModelConfig
from isoform.nn.biases import RelativeBias
from isoform.nn.embedding import Embedding
from isoform.nn.experts import Experts
from isoform.nn.heads import TokenHead
from isoform.nn.linear import Packed
from isoform.nn.norms import Norm
from isoform.nn.positions import Learned


@torch.no_grad()
def initialise(model: nn.Module, config: ModelConfig, seed: int | None = None) -> None:
    """Draw all weights: Glorot-uniform projections (each part of a packed one by its own shape), zero biases,
    unit gains, N(0, 1/d) tables; in Pre-LN stacks the last projection of every residual branch is divided by
    √(2 · layers), which keeps the stream's variance at depth (Radford et al. 2019).

    Args:
        model: what `build` made.
        config: its configuration.
        seed: of a generator of its own; None uses the global one.
    """
    device = next(model.parameters()).device
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    for module in model.modules():
        if isinstance(module, Packed):
            for name in module.parts:
                _glorot(module.part(name), generator)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.Linear):
            _glorot(module.weight, generator)
            if module.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
                module.bias.zero_()
        elif isinstance(module, Experts):
            for weight in (module.up, module.down):
                for expert in weight:
                    _glorot(expert, generator)
        elif isinstance(module, Embedding):
            module.weight.normal_(0.0, config.d_model**-0.5, generator=generator)
            if module.token_types is not None:
                module.token_types.normal_(0.0, config.d_model**-0.5, generator=generator)
        elif isinstance(module, Learned | RelativeBias):
            module.weight.normal_(0.0, config.d_model**-0.5, generator=generator)
        elif isinstance(module, TokenHead):
            if not module.cfg.tied:
                module.weight.normal_(0.0, config.d_model**-0.5, generator=generator)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, Norm):
            if module.weight is not None:
                module.weight.fill_(1.0 - module.cfg.gain_offset)
            if module.bias is not None:
                module.bias.zero_()
    _shrink_branches(model, config)


def _glorot(weight: Tensor, generator: torch.Generator | None) -> None:
    bound = math.sqrt(6.0 / sum(weight.shape))
    weight.uniform_(-bound, bound, generator=generator)


def _shrink_branches(model: nn.Module, config: ModelConfig) -> None:
    for side in ("encoder", "decoder"):
        stack = getattr(config, side)
        if stack is None or stack.layer.placement == "post":
            continue
        for name, weight in model.get_submodule(side).named_parameters():
            if name.endswith(("body.output.weight", "down.weight", "attention.output.weight", "body.down")):
                weight.mul_((2 * stack.n_layers) ** -0.5)
