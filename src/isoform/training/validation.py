"""The validation part's negative log-likelihood: what chooses the checkpoint and the stop (R35)."""

from __future__ import annotations

import torch

from isoform.data.batching import Batch, Batches, LabelledBatch
from isoform.errors import SupervisionError
from isoform.nn import Transformer
from isoform.training.loss import Work, batch_loss
from isoform.training.trial import Context


@torch.no_grad()
def mean_nll(
    model: Transformer,
    batches: Batches[Batch] | Batches[LabelledBatch],
    device: torch.device,
    context: Context,
) -> tuple[float, int]:
    """Sum of -log p over all supervised positions, divided by their number; labels are not smoothed (R34).

    Dropout is off; the network is left in the mode it was in. Every batch of epoch 0 is read.

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
        for batch in batches.epoch(0):
            work = Work.of(batch, device)
            if work.count:
                with context():
                    nll = batch_loss(model, work).nll
                total += nll.to(total.device, total.dtype)
                count += work.count
    finally:
        model.train(training)
    if count == 0:
        raise SupervisionError("validation: no position is supervised, so there is nothing to measure")
    return float(total) / count, count
