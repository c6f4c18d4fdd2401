"""Which weights a run ends with: validation chooses (R35)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, cast

from isoform.nn import Transformer
from isoform.training.checkpoint import Store, fill
from isoform.training.state import RunState

Weights = Literal["best", "average", "last"]


def choose_weights(
    model: Transformer,
    store: Store,
    state: RunState,
    candidates: Mapping[str, Sequence[int]],
    validate: Callable[[], float],
    say: Callable[[str], None],
) -> tuple[Weights, float]:
    """Leave the network with the best checkpoint's weights, or a mean of several where that is better.

    Args:
        model: the network.
        store: its checkpoints.
        state: says which was best.
        candidates: name to steps whose mean is tried; those of fewer than two are not.
        validate: the NLL of the network as it is.
        say: takes a remark.

    Returns:
        Which weights it has now, and their NLL.
    """
    assert state.best_step is not None and state.best_nll is not None
    chosen, lowest, steps = "best", state.best_nll, [state.best_step]
    for name, members in candidates.items():
        if len(members) < 2:
            continue
        fill(model, store.average(members), "mean of checkpoints")
        nll = validate()
        say(
            f"mean of the {name} checkpoints, steps {', '.join(map(str, members))}: validation NLL {nll:.4f};"
            f" the best checkpoint has {state.best_nll:.4f}"
        )
        if nll < lowest:
            chosen, lowest, steps = "average", nll, list(members)
    fill(model, store.average(steps), str(store.path(steps[0])))
    return cast("Weights", chosen), lowest
