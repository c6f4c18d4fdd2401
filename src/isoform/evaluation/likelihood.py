"""What a network thinks of the data: negative log-likelihood and perplexity (R34–R35)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

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
from isoform.nn.exact import exact_products

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


@dataclasses.dataclass(frozen=True, eq=False)
class Likelihood:
    """What each row of some data gave, in the order of the data, whatever the batches were.

    Attributes:
        rows: which record each row comes from.
        table: ``[rows, 2]`` sum of -log p in nats, and number of supervised positions.
    """

    rows: tuple[int, ...]
    table: Floats


def row_likelihoods(model: Transformer, batches: Iterable[Batch | LabelledBatch]) -> Likelihood:
    """Read all batches once; the network is in eval mode meanwhile.

    Raises:
        SupervisionError: nothing is supervised.
    """
    training = model.training
    model.eval()
    found: list[tuple[int, float, float]] = []
    try:
        for batch in batches:
            with exact_products(model.embedding.weight.device):
                sums, counts = row_nll(model, batch)
            found += zip(batch.rows.tolist(), sums.tolist(), counts.tolist(), strict=True)
    finally:
        model.train(training)
    found.sort()
    table = np.array([row[1:] for row in found], dtype=np.float64).reshape(-1, 2)
    if not table[:, 1].sum():
        raise SupervisionError("nll: no position is supervised, so there is nothing to measure")
    return Likelihood(tuple(row[0] for row in found), table)


def nll(found: Likelihood, texts: Iterable[str] | None = None) -> Counted:
    """Negative log-likelihood a supervised position, in nats; perplexity is its exponential.

    Per word and per byte the whole sum, ends of sequences included, is divided by the whitespace-separated
    words and the UTF-8 bytes of the texts: unlike the figure per token, those can be compared between
    tokenizations. Resampled by row.

    Args:
        found: what a network said.
        texts: what it predicted, as text (of a stream the whole, though nothing predicts its first token);
            None: no figures by word and byte.
    """
    words = size = 0
    for text in texts or ():
        words, size = words + len(text.split()), size + len(text.encode())

    def parts(sums: Floats) -> dict[str, float]:
        total, count = sums.tolist()
        result = {"perplexity": _exp(total / count)}
        if words:
            result |= {"nll_per_word": total / words, "perplexity_per_word": _exp(total / words)}
        if size:
            result |= {"bits_per_byte": total / size / math.log(2), "perplexity_per_byte": _exp(total / size)}
        return result

    signature = f"unit:nats/token|smoothing:none|end:included|version:{__version__}"
    return Counted("nll", found.table, ratio, signature, "less", size=lambda s: int(s[1]), parts=parts)


def bits_per_byte(found: Likelihood, texts: Mapping[int, str]) -> Counted:
    """Negative log-likelihood, ends of sequences included, in bits a UTF-8 byte of what is predicted.

    Two networks with tokenizers of their own can be held against each other by it. Resampled by row.

    Args:
        found: what a network said.
        texts: the text that each row predicts, by record.
    """
    sizes = np.array([len(texts[row].encode()) for row in found.rows], dtype=np.float64)
    table = np.stack([found.table[:, 0] / math.log(2), sizes], axis=1)
    signature = f"unit:bits/byte|smoothing:none|end:included|version:{__version__}"
    return Counted("bits_per_byte", table, ratio, signature, "less", size=lambda s: int(s[1]))


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _scores(logits: Tensor | None) -> Tensor:
    if logits is None:
        raise ConfigError("the network has no head: it gives no scores to take a likelihood from")
    return logits if logits.dtype == torch.float64 else logits.float()
