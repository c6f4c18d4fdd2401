"""The validation part's negative log-likelihood: what chooses the checkpoint and the stop (R35)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from isoform.data.batching import Batch, Batches, LabelledBatch
from isoform.errors import SupervisionError
from isoform.nn import Transformer
from isoform.nn.exact import exact_products
from isoform.training.group import ALONE, Group
from isoform.training.loss import Work, batch_loss
from isoform.training.trial import Context


@torch.no_grad()
def mean_nll(
    model: Transformer,
    batches: Batches[Batch] | Batches[LabelledBatch],
    device: torch.device,
    context: Context,
    *,
    learner: Callable[[Work], tuple[Tensor, Tensor, Tensor]] | None = None,
    group: Group = ALONE,
) -> tuple[float, int]:
    """Sum of -log p over all supervised positions, divided by their number; labels are not smoothed (R34).

    Dropout is off; the network is left in the mode it was in. Every batch of epoch 0 is read, by several
    processes in turn; one that has run out reads its last batch again, uncounted, until all have.

    Args:
        model: the network.
        batches: the validation part.
        device: where the network is.
        context: what a pass runs in.
        learner: what is called where the network is shared out; None: the network itself.
        group: the processes that share the batches.

    Returns:
        The mean in nats, and the number of positions.

    Raises:
        SupervisionError: nothing is supervised.
    """
    training = model.training
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=device if device.type != "mps" else "cpu")
    count = 0
    try:
        for work, counted in _shares(batches, device, group):
            with context(), exact_products(device):  # as in the loop, which this may be outside of
                nll = batch_loss(model, work).nll if learner is None else learner(work)[1]
            if counted:
                total += nll.to(total.device, total.dtype)
                count += work.count
    finally:
        model.train(training)
    summed, number = group.total([float(total), count])
    count = int(number)
    if count == 0:
        raise SupervisionError("validation: no position is supervised, so there is nothing to measure")
    return summed / count, count


def _shares(
    batches: Batches[Batch] | Batches[LabelledBatch], device: torch.device, group: Group
) -> Iterator[tuple[Work, bool]]:
    """This process's batches that have a label, and whether each counts."""
    if group.alone:
        for batch in batches.epoch(0):
            work = Work.of(batch, device)
            if work.count:
                yield work, True
        return
    fill = None
    for start in range(0, batches.count(0), group.size):
        mine = start + group.rank
        work = None
        if mine < batches.count(0):
            work = Work.of(next(iter(batches.epoch(0, mine))), device)
        counted = work is not None and work.count > 0
        if not counted:
            fill = Work.of(batches.largest(), device) if fill is None else fill
            work = fill
        assert work is not None
        if work.count:
            yield work, counted
