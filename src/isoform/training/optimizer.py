"""AdamW over a network, and its state as named tensors."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from isoform.errors import ArtifactError, ConfigError, did_you_mean
from isoform.nn import Transformer
from isoform.training.settings import Optimizer

FUSED = ("cpu", "cuda", "mps", "xpu")
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def adamw(model: Transformer, settings: Optimizer) -> torch.optim.AdamW:
    """The optimizer of all parameters that learn; only matrices decay.

    Vectors (biases, gains) and the router's single rows are left alone: shrinking them regularises nothing
    and moves the function. Embedding tables are matrices. The rate is set before every step; each group's
    ``factor`` multiplies it.

    Raises:
        ConfigError: a pattern that no parameter has, or nothing learns.
    """
    factors = rate_factors(model, settings)
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups.setdefault((parameter.dim() >= 2, factors[name]), []).append(parameter)
    if not groups:
        raise ConfigError("training.freeze leaves nothing to learn")
    fused = all(p.device.type in FUSED for p in model.parameters())
    return torch.optim.AdamW(
        [
            {"params": members, "weight_decay": settings.weight_decay if matrix else 0.0, "factor": factor}
            for (matrix, factor), members in sorted(
                groups.items(), key=lambda item: (not item[0][0], item[0])
            )
        ],
        lr=0.0,
        betas=settings.betas,
        eps=settings.eps,
        fused=fused,
    )


def rate_factors(model: Transformer, settings: Optimizer) -> dict[str, float]:
    """What the rate of each parameter is multiplied by.

    Layer k of a stack of n layers has layer_decay^(n - 1 - k), what stands before the layers
    (embeddings, their norm, relative biases) layer_decay^n, and what stands after them 1.
    """
    names = [name for name, _ in model.named_parameters()]
    found = {name: settings.layer_decay ** _depth(name, model) for name in names}
    for rate in settings.rates:
        for name in matching(rate.pattern, names, "training.optimizer.rates"):
            found[name] *= rate.factor
    return found


def freeze(model: Transformer, patterns: Sequence[str]) -> None:
    """Take the parameters that match out of the learning; a shared one is named by its first name.

    Raises:
        ConfigError: a pattern that no parameter has.
    """
    named = dict(model.named_parameters())
    for pattern in patterns:
        for name in matching(pattern, list(named), "training.freeze"):
            named[name].requires_grad_(False)


def matching(pattern: str, names: Sequence[str], key: str) -> list[str]:
    """The names that a shell pattern matches.

    Raises:
        ConfigError: none does.
    """
    found = fnmatch.filter(names, pattern)
    if not found:
        hint = did_you_mean(pattern, names)
        near = hint if hint.startswith("; did") else f"; a name is, for instance, {names[0]}"
        raise ConfigError(f"{key}: nothing is named {pattern!r}{near}")
    return found


def set_rate(optimizer: torch.optim.AdamW, rate: float) -> None:
    """The learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["factor"]


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
    return {
        f"{part}.{name}": value.detach()
        for name, parameter in names
        for part, value in optimizer.state.get(parameter, {}).items()
    }


def restore_state(
    optimizer: torch.optim.AdamW, names: Iterable[tuple[str, nn.Parameter]], tensors: Mapping[str, Tensor]
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
        optimizer.state[parameter] = dict(_placed(parameter, parts))
    if left:
        raise ArtifactError(f"optimizer state of an unknown parameter: {next(iter(left))}")


def _placed(parameter: nn.Parameter, parts: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    from isoform.training.parallel import cut_like

    for part, value in parts.items():
        dtype = torch.float32 if part == "step" else parameter.dtype
        moved = value.to(device=parameter.device, dtype=dtype)
        yield part, moved.clone() if part == "step" else cut_like(moved, parameter.detach()).clone()


def _depth(name: str, model: Transformer) -> int:
    """How many layers down from the top a parameter stands."""
    found = re.match(r"(encoder|decoder)\.layers\.(\d+)\.", name)
    sizes = {
        side: len(stack.layers)
        for side, stack in (("encoder", model.encoder), ("decoder", model.decoder))
        if stack is not None
    }
    if found is not None:
        return sizes[found[1]] - 1 - int(found[2])
    side = name.partition(".")[0]
    if side == "source_embedding":
        return sizes["encoder"]
    if side == "embedding":
        return sizes["encoder" if model.decoder is None else "decoder"]
    return sizes[side] if side in sizes and ".relative_bias." in name else 0
