"""What no training is begun with: labels that leak, inputs not shifted once, a head that does not fit."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from isoform.data.batching import Batch, LabelledBatch, refuse_leaks
from isoform.errors import ConfigError, SupervisionError
from isoform.nn import Transformer
from isoform.tokens import Tokens


def check_supervision(
    supervised: Bool[Tensor, "batch length"], prefix: Int[Tensor, " batch"] | int, real: Tensor | None = None
) -> None:
    """Refuse labels that a prefix mask shows to the network (R23, exercise 6.7).

    Position i reads all positions up to the prefix's last, and so its own label, the input at i + 1, when
    i + 1 still lies inside. Length 6 and prefix 3: positions 1 and 2 leak, 3 to 5 do not.

    Args:
        supervised: ``[B, T]`` which positions are to predict the input after them.
        prefix: ``[B]`` real tokens of each prefix, or one number for all.
        real: ``[B, T]`` True where a token is real.

    Raises:
        SupervisionError: names the row and the positions, counted from 1.
    """
    lengths = torch.full((len(supervised),), prefix) if isinstance(prefix, int) else prefix
    refuse_leaks(supervised, Tokens(torch.zeros_like(supervised, dtype=torch.long), real, prefix=lengths))


def check_shift(batch: Batch) -> None:
    """Refuse a batch whose inputs are not its labels shifted by exactly one (R24, R30).

    Wherever two real positions of one document follow each other, the second's input has to be the first's
    label. A target fed at its own position is a leak even under a triangle; one shifted twice trains the
    network to skip a token.

    Raises:
        SupervisionError: says which of the two it is.
    """
    tokens, labels = batch.decoder_input, batch.labels
    ids, real = tokens.ids, tokens.real_or_ones()
    follows = real[:, :-1] & real[:, 1:] & batch.supervised[:, :-1]
    if tokens.documents is not None:
        follows &= tokens.documents[:, 1:] == tokens.documents[:, :-1]
    wrong = follows & (ids[:, 1:] != labels[:, :-1])
    if not bool(wrong.any()):
        return
    row = int(wrong.any(-1).nonzero()[0])
    fed = bool((ids == labels)[batch.supervised].all())
    twice = follows[:, :-1] & real[:, 2:]
    if fed:
        reason = (
            "each position is fed the very token it is to predict: the shift is missing, and the target leaks"
        )
    elif bool(twice.any()) and bool((ids[:, 2:] == labels[:, :-2])[twice].all()):
        reason = "the inputs are shifted twice: each position is to predict the token after the next"
    else:
        reason = "its labels are not the inputs one position later"
    raise SupervisionError(
        f"batch row {row} (record {int(batch.rows[row])}): {reason}; exactly one shift is due"
    )


def check_fit(model: Transformer, batch: Batch | LabelledBatch) -> None:
    """Refuse a network that would see what it is to predict, or that has another head than the labels need.

    Raises:
        SupervisionError: next tokens are to be predicted under a bidirectional mask.
        ConfigError: the head does not fit.
    """
    cfg = model.config
    wanted = "tokens" if isinstance(batch, Batch) else "sequence_labels" if batch.labels.dim() == 1 else None
    kind = None if cfg.head is None else cfg.head.kind
    if kind not in ((wanted,) if wanted else ("tokens", "token_labels")):
        raise ConfigError(
            f"model.head is {kind or 'none'}, but the data asks for {wanted or 'tokens or token_labels'}"
        )
    if isinstance(batch, Batch):
        if cfg.stack.visibility == "bidirectional":
            raise SupervisionError(
                "visibility 'bidirectional' lets every position read the token after it, which it is to"
                " predict; use 'causal' or 'prefix', or train on masked tokens"
            )
        if (batch.source is not None) != (cfg.source is not None):
            raise ConfigError(
                "the data has a source and the network none: an encoder–decoder is needed"
                if batch.source is not None
                else "the network is an encoder–decoder and the data has no source"
            )
    elif cfg.source is not None:
        raise ConfigError("labels of a text need a single stack, not an encoder–decoder")
