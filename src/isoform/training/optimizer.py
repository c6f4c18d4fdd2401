"""AdamW over a network, and its state as named tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from isoform.errors import ArtifactError
from isoform.training.settings import Optimizer

FUSED = ("cpu", "cuda", "mps", "xpu")
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def adamw(model: nn.Module, settings: Optimizer) -> torch.optim.AdamW:
    """The optimizer of all parameters; only matrices decay.

    Vectors (biases, gains) and the router's single rows are left alone: shrinking them regularises nothing
    and moves the function. Embedding tables are matrices. The rate is set before every step.
    """
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = all(p.device.type in FUSED for p in parameters)
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=0.0, betas=settings.betas, eps=settings.eps, fused=fused
    )


def set_rate(optimizer: torch.optim.AdamW, rate: float) -> None:
    """The learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def update(optimizer: torch.optim.AdamW, bad: Tensor) -> None:
    """Make a step, unless ``bad`` is 1: then a fused optimizer leaves weights and memory as they are, without
    waiting for the device to know.

    The attribute is the one PyTorch's own gradient scaler speaks to fused optimizers by.
    """
    if optimizer.defaults["fused"]:
        optimizer.found_inf = bad  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.step()
    elif not bool(bad):
        optimizer.step()


def state_tensors(
    optimizer: torch.optim.AdamW, names: Iterable[tuple[str, nn.Parameter]]
) -> dict[str, Tensor]:
    """The optimizer's memory as ``exp_avg.decoder.layers.0.…`` tensors; none of parameters never updated."""
    found: dict[str, Tensor] = {}
    for name, parameter in names:
        for part, value in optimizer.state.get(parameter, {}).items():
            found[f"{part}.{name}"] = value.detach()
    return found


def restore_state(
    optimizer: torch.optim.AdamW, names: Iterable[tuple[str, nn.Parameter]], tensors: dict[str, Tensor]
) -> None:
    """Put back what `state_tensors` gave.

    Raises:
        ArtifactError: a tensor of another shape, one missing, or one too many.
    """
    left = dict(tensors)
    optimizer.state.clear()
    for name, parameter in names:
        parts = {part: left.pop(f"{part}.{name}") for part in MOMENTS if f"{part}.{name}" in left}
        if not parts:
            continue
        if missing := [part for part in MOMENTS if part not in parts]:
            raise ArtifactError(f"optimizer state of {name}: {missing[0]} is missing")
        for part in MOMENTS[1:]:
            if parts[part].shape != parameter.shape:
                raise ArtifactError(
                    f"optimizer state of {name}: {part} has shape {list(parts[part].shape)}, expected"
                    f" {list(parameter.shape)}"
                )
        optimizer.state[parameter] = {
            part: value.to(
                device=parameter.device, dtype=torch.float32 if part == "step" else parameter.dtype
            ).clone()
            for part, value in parts.items()
        }
    if left:
        raise ArtifactError(f"optimizer state of an unknown parameter: {next(iter(left))}")
