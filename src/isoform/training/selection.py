"""Which weights a run ends with: validation chooses (R35)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from isoform.nn import Transformer
from isoform.training.checkpoint import Store, fill
from isoform.training.state import RunState

Weights = Literal["best", "average", "last"]


def choose_weights(
    model: Transformer,
    store: Store,
    state: RunState,
    last: Sequence[int],
    validate: Callable[[], float],
    say: Callable[[str], None],
) -> tuple[Weights, float]:
    """Leave the network with the best checkpoint's weights, or the mean of the last where that is better.

    Args:
        model: the network.
        store: its checkpoints.
        state: says which was best.
        last: steps whose mean is a candidate; none where there are fewer than two.
        validate: the NLL of the network as it is.
        say: takes a remark.

    Returns:
        Which weights it has now, and their NLL.
    """
    assert state.best_step is not None and state.best_nll is not None
    if len(last) > 1:
        fill(model, store.average(last), "mean of checkpoints")
        nll = validate()
        say(
            f"mean of the checkpoints of steps {', '.join(map(str, last))}: validation NLL {nll:.4f};"
            f" the best checkpoint has {state.best_nll:.4f}"
        )
        if nll < state.best_nll:
            return "average", nll
    store.load_weights(state.best_step, model)
    return "best", state.best_nll
