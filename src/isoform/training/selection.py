"""Which weights a run ends with: validation chooses (R35)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from isoform.nn import Transformer
from isoform.training.checkpoint import Store
from isoform.training.learnt import fill

Weights = Literal["best", "average", "last"]


@dataclasses.dataclass(frozen=True)
class Candidates:
    """What a run may end with; all of these checkpoints are whole.

    Attributes:
        newest: the last step.
        ranking: validation NLL and step of the best, best first.
        means: name to steps whose mean is tried; those of fewer than two are not.
    """

    newest: int
    ranking: Sequence[tuple[float, int]]
    means: Mapping[str, Sequence[int]]


def choose_weights(
    model: Transformer,
    store: Store,
    candidates: Candidates,
    validate: Callable[[], float],
    say: Callable[[str], None],
) -> tuple[Weights, float]:
    """Leave the network with the best checkpoint's weights, or a mean of several where that is better. Where
    none of the best is whole any more, the last ones take their place.

    Args:
        model: the network.
        store: its checkpoints.
        candidates: what is tried.
        validate: the NLL of the network as it is.
        say: takes a remark.

    Returns:
        Which weights it has now, and their NLL.
    """
    chosen: Weights = "best"
    if candidates.ranking:
        lowest, best = candidates.ranking[0]
    else:
        chosen, best = "last", candidates.newest
        fill(model, store.average([best]), str(store.path(best)))
        lowest = validate()
    single, steps, before = chosen, [best], lowest
    for name, members in candidates.means.items():
        if len(members) < 2:
            continue
        fill(model, store.average(members), "mean of checkpoints")
        nll = validate()
        say(
            f"mean of the {name} checkpoints, steps {', '.join(map(str, members))}: validation NLL {nll:.4f};"
            f" the {single} checkpoint has {before:.4f}"
        )
        if nll < lowest:
            chosen, lowest, steps = "average", nll, list(members)
    fill(model, store.average(steps), str(store.path(steps[0])))
    return chosen, lowest
