"""Weights of one network in another that differs from it in its head."""

from __future__ import annotations

import dataclasses

import torch

from isoform.errors import ArtifactError
from isoform.nn import Transformer

HEAD = "head."


@dataclasses.dataclass(frozen=True)
class Transplant:
    """What was taken, by name.

    Attributes:
        taken: parameters that both have.
        new: parameters that keep their first values.
        dropped: parameters that have no place.
    """

    taken: tuple[str, ...]
    new: tuple[str, ...]
    dropped: tuple[str, ...]

    def sentences(self) -> list[str]:
        """In words."""
        found = [f"{len(self.taken)} parameters are taken from the checkpoint"]
        for word, names in (("new, with random values", self.new), ("dropped", self.dropped)):
            if names:
                found.append(f"{word}: {', '.join(names)}")
        return found


@torch.no_grad()
def transplant(source: Transformer, target: Transformer) -> Transplant:
    """Copy every parameter of the same name; only those of the head may be new or dropped.

    Args:
        source: the network whose weights are taken; left as it is.
        target: the network that gets them, in place.

    Raises:
        ArtifactError: any other parameter is missing or has another shape.
    """
    have, want = dict(source.named_parameters()), dict(target.named_parameters())
    same = [name for name in want if name in have and have[name].shape == want[name].shape]
    new = [name for name in want if name not in same]
    dropped = [name for name in have if name not in same]
    for name in (*new, *dropped):
        if not name.startswith(HEAD):
            shapes = [list(side[name].shape) if name in side else "nothing" for side in (have, want)]
            raise ArtifactError(
                f"{name}: the checkpoint has {shapes[0]}, the network wants {shapes[1]};"
                " only the head may differ"
            )
    for name in same:
        want[name].copy_(have[name])
    return Transplant(tuple(same), tuple(new), tuple(dropped))
