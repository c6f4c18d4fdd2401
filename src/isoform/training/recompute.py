"""Layers whose intermediates are computed again in the backward pass (Chen et al. 2016)."""

from __future__ import annotations

import functools

from torch.utils.checkpoint import checkpoint

from isoform.nn import Transformer
from isoform.training.parallel import stacks


def recompute_layers(model: Transformer, on: bool) -> None:
    """Hold only each layer's input from the forward to the backward pass, or put it back as it was.

    The same numbers come out, dropout's draws included. Names of modules and parameters stay; what a sharded
    network does before and after a layer goes on around it.
    """
    for stack in stacks(model):
        for block in dict.fromkeys(stack.layers):
            if on:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
            else:
                block.__dict__.pop("forward", None)
