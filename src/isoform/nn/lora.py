"""Low-rank adapters on linear maps: W + (alpha / rank) · B A, of which A and B learn (Hu et al. 2021)."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

from isoform.errors import ConfigError, did_you_mean
from isoform.nn.linear import Linear, Packed
from isoform.nn.model import Transformer

WHOLE = "all"  # the name of a map's only projection


class LowRank(nn.Module):
    """What stands in a map's place of ``weight``: the weight, and an increment for chosen projections of it.

    A is drawn as `torch.nn.Linear` draws its weight, B is zero: at first nothing is changed.

    Args:
        weight: ``[out, in]``, of one projection or of several below each other.
        rows: the projections' heights, in their order.
        chosen: which of them get factors.
        rank: of the increments.
        alpha: the increment is multiplied by alpha / rank.
        generator: draws A.
    """

    def __init__(
        self,
        weight: Float[Tensor, "out width"],
        rows: dict[str, int],
        chosen: Sequence[str],
        rank: int,
        alpha: float,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.rows, self.scale = rows, alpha / rank
        width = weight.shape[1]
        bound = 1 / math.sqrt(width)
        self.down = nn.ParameterDict()
        self.up = nn.ParameterDict()
        for name in chosen:
            a = torch.empty(rank, width, dtype=weight.dtype)
            self.down[name] = nn.Parameter(a.uniform_(-bound, bound, generator=generator).to(weight.device))
            self.up[name] = nn.Parameter(weight.new_zeros(rows[name], rank))

    def forward(self, weight: Float[Tensor, "out width"]) -> Float[Tensor, "out width"]:
        """The weight with its increments."""
        pieces: list[Tensor] = []
        for name, piece in zip(self.rows, weight.split(list(self.rows.values())), strict=True):
            if name in self.up:
                piece = torch.addmm(piece, self.up[name], self.down[name], alpha=self.scale)
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def attach(model: Transformer, *, rank: int, alpha: float, targets: Sequence[str], seed: int) -> list[str]:
    """Put adapters on the projections that match, in place, and let nothing else learn.

    Args:
        model: the network.
        rank: see `LowRank`.
        alpha: see `LowRank`.
        targets: patterns, as in a shell, of names of projections: ``*.feed_forward.body.up``,
            ``*.attention.body.qkv.query`` (of a packed map each projection has a name).
        seed: of the first values.

    Returns:
        The names of the projections.

    Raises:
        ConfigError: a pattern that nothing has.
    """
    known = dict(projections(model))
    for pattern in targets:
        if not fnmatch.filter(known, pattern):
            hint = did_you_mean(pattern, known)
            near = hint if hint.startswith("; did") else f"; a name is, for instance, {next(iter(known))}"
            raise ConfigError(f"lora.targets: no linear map is named {pattern!r}{near}")
    chosen = [name for name in known if any(fnmatch.fnmatchcase(name, pattern) for pattern in targets)]
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    by_map: dict[str, list[str]] = {}
    for name in chosen:
        owner, part = known[name]
        by_map.setdefault(owner, []).append(part)
    for owner, parts in by_map.items():
        module = model.get_submodule(owner)
        assert isinstance(module, Linear | Packed)
        added = LowRank(module.weight, _rows(module), parts, rank, alpha, generator)
        parametrize.register_parametrization(module, "weight", added)
    return chosen


def adapted(model: nn.Module) -> bool:
    """Whether there are adapters."""
    return any(isinstance(module, LowRank) for module in model.modules())


def factors(model: Transformer) -> dict[str, nn.Parameter]:
    """The factors by name: ``decoder.layers.0.….query.up`` and ``….down``."""
    found: dict[str, nn.Parameter] = {}
    for owner, module in model.named_modules():
        if parametrize.is_parametrized(module, "weight"):
            held: Any = module.parametrizations
            added: LowRank = held.weight[0]
            for part in added.up:
                name = owner if part == WHOLE else f"{owner}.{part}"
                found |= {f"{name}.up": added.up[part], f"{name}.down": added.down[part]}
    return found


@torch.no_grad()
def merge(model: Transformer) -> Transformer:
    """Make the weights what they are with their increments, in place: a plain network, to the bit the same
    function. Returns the network."""
    for module in list(model.modules()):
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
    return model.requires_grad_(True)


def projections(model: Transformer) -> Iterator[tuple[str, tuple[str, str]]]:
    """Every linear map that an adapter can be put on: its name, and the module and part it is."""
    for owner, module in model.named_modules():
        if isinstance(module, Packed):
            yield from ((f"{owner}.{part}", (owner, part)) for part in module.parts)
        elif isinstance(module, Linear):
            yield owner, (owner, WHOLE)


def _rows(module: Linear | Packed) -> dict[str, int]:
    return module.parts if isinstance(module, Packed) else {WHOLE: module.out_features}
