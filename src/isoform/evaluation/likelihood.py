"""What a network thinks of the data: negative log-likelihood and perplexity (R34–R35)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from isoform import __version__
from isoform.data.batching import Batch, LabelledBatch
from isoform.errors import ConfigError, SupervisionError
from isoform.evaluation.score import Counted, Floats, ratio
from isoform.nn import Transformer

POSITIONS = 4096  # states scored at once


@torch.inference_mode()
def row_nll(
    model: Transformer, batch: Batch | LabelledBatch
) -> tuple[Float[Tensor, " batch"], Int[Tensor, " batch"]]:
    """Sum of -log p over each row's supervised positions in nats, and their number.

    Labels are not smoothed (R34). Log-probabilities are taken in float32, or in float64 where the scores are,
    and summed in float64. Only supervised positions reach the output matrix.

    Args:
        model: a network with a head; taken as it is, so put it in eval mode.
        batch: next tokens, or labels of what is read.
    """
    device = model.embedding.weight.device
    batch = batch.to(device)
    rows = len(batch.rows)
    sums = torch.zeros(rows, dtype=torch.float64, device=device)
    if batch.labels.dim() == 1:
        assert isinstance(batch, LabelledBatch)
        scores = _scores(model(batch.tokens).logits)
        nll = F.cross_entropy(scores, batch.labels, reduction="none").double()
        return torch.where(batch.supervised, nll, 0.0), batch.supervised.long()
    if isinstance(batch, Batch):
        memory = None if batch.source is None else model.encode(batch.source)
        hidden = model.hidden(batch.decoder_input, memory=memory)
    else:
        hidden = model.hidden(batch.tokens)
    row, column = batch.supervised.nonzero(as_tuple=True)
    head = model.head
    if not isinstance(head, nn.Module):
        raise ConfigError("the network has no head: it gives no scores to take a likelihood from")
    for start in range(0, len(row), POSITIONS):
        r, c = row[start : start + POSITIONS], column[start : start + POSITIONS]
        nll = F.cross_entropy(_scores(head(hidden[r, c])), batch.labels[r, c], reduction="none")
        sums.index_add_(0, r, nll.double())
    return sums, batch.supervised.sum(-1)


def nll(
    model: Transformer, batches: Iterable[Batch | LabelledBatch], texts: Iterable[str] | None = None
) -> Counted:
    """Negative log-likelihood a supervised position, in nats; perplexity is its exponential.

    Per word and per byte the whole sum, ends of sequences included, is divided by the whitespace-separated
    words and the UTF-8 bytes of the texts: unlike the figure per token, those can be compared between
    tokenizations. Resampled by row.

    Args:
        model: the network; it is in eval mode meanwhile.
        batches: what is predicted.
        texts: what they predict, as text (of a stream the whole, though nothing predicts its first token);
            None: no figures by word and byte.

    Raises:
        SupervisionError: nothing is supervised.
    """
    training = model.training
    model.eval()
    found: list[tuple[float, float]] = []
    try:
        for batch in batches:
            sums, counts = row_nll(model, batch)
            found += zip(sums.tolist(), counts.tolist(), strict=True)
    finally:
        model.train(training)
    table = np.array(found, dtype=np.float64).reshape(-1, 2)
    if not table[:, 1].sum():
        raise SupervisionError("nll: no position is supervised, so there is nothing to measure")
    words = size = 0
    for text in texts or ():
        words, size = words + len(text.split()), size + len(text.encode())

    def parts(sums: Floats) -> dict[str, float]:
        total, count = sums.tolist()
        result = {"perplexity": _exp(total / count)}
        if words:
            result |= {"nll_per_word": total / words, "perplexity_per_word": _exp(total / words)}
        if size:
            result |= {"bits_per_byte": total / size / math.log(2)}
        return result

    signature = f"unit:nats/token|smoothing:none|end:included|version:{__version__}"
    return Counted("nll", table, ratio, signature, "less", size=lambda s: int(s[1]), parts=parts)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _scores(logits: Tensor | None) -> Tensor:
    if logits is None:
        raise ConfigError("the network has no head: it gives no scores to take a likelihood from")
    return logits if logits.dtype == torch.float64 else logits.float()
