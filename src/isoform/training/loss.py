"""What training minimises: sums over supervised positions, their number, and nothing else (Algorithm 6.1)."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from isoform import config
from isoform.data.batching import Batch, LabelledBatch, refuse_leaks
from isoform.errors import ConfigError, SupervisionError
from isoform.nn import Transformer
from isoform.nn.experts import Router
from isoform.tokens import Tokens

CHUNK = 2**25  # scores held at once: 128 MiB in float32


@dataclasses.dataclass(frozen=True, eq=False)
class Work:
    """A batch reduced to what the loss reads, on the device that computes it.

    Where the supervised positions are is found out on the CPU, before the move, so that an accelerator is
    never waited for.

    Args:
        tokens: what the only stack, or the decoder, reads.
        source: what the encoder of an encoder–decoder reads.
        places: ``[N]`` supervised positions, as indices into the flattened ``[B, T]``, or into ``[B]`` for
            labels of whole texts.
        labels: ``[N]`` what is to be predicted there.
        by_row: whether labels belong to whole texts.
        real_tokens: ids that are read, padding left out, both sides.
    """

    tokens: Tokens
    source: Tokens | None
    places: Int[Tensor, " positions"]
    labels: Int[Tensor, " positions"]
    by_row: bool
    real_tokens: int

    @classmethod
    def of(cls, batch: Batch | LabelledBatch, device: torch.device | str | None = None) -> Work:
        """Take a batch to a device; None leaves it where it is."""
        tokens, source = (
            (batch.decoder_input, batch.source) if isinstance(batch, Batch) else (batch.tokens, None)
        )
        places = batch.supervised.flatten().nonzero()[:, 0]
        labels = batch.labels.flatten()[places]
        real = sum(
            t.ids.numel() if t.real is None else int(t.real.sum()) for t in (tokens, source) if t is not None
        )
        by_row = batch.labels.dim() == 1
        if device is not None:
            tokens, places, labels = tokens.to(device), places.to(device), labels.to(device)
            source = None if source is None else source.to(device)
        return cls(tokens, source, places, labels, by_row, real)

    @property
    def count(self) -> int:
        """Supervised positions."""
        return len(self.places)


@dataclasses.dataclass(frozen=True, eq=False)
class Sums:
    """The loss of a batch before it is divided, so that the caller can divide by the count of a whole step.

    Args:
        loss: sum of the cross entropy with smoothed labels (R34); differentiable.
        nll: sum of the negative log-likelihood of the labels themselves; without a gradient.
        balance: mean auxiliary loss of the routers (Fedus et al. 2021), 0 without any; differentiable.
        count: supervised positions.
    """

    loss: Float[Tensor, ""]
    nll: Float[Tensor, ""]
    balance: Float[Tensor, ""]
    count: int


def batch_loss(
    model: Transformer, batch: Batch | LabelledBatch | Work, *, smoothing: float = 0.0, z_loss: float = 0.0
) -> Sums:
    """Run a batch through the network and sum its loss.

    Only the states of supervised positions reach the output matrix: padding costs nothing there.

    Args:
        model: the network; in training mode its routers leave their balance loss.
        batch: next tokens, or labels of what is read.
        smoothing: eta of (1 - eta) onehot + eta u with u uniform (R34).
        z_loss: zeta of zeta · (log Σ exp z)² a position (Chowdhery et al. 2022, §5).

    Raises:
        SupervisionError: the batch has no supervised position; the caller skips such (R30).
        ConfigError: the network has no head that the labels fit.
    """
    work = batch if isinstance(batch, Work) else Work.of(batch)
    if work.count == 0:
        raise SupervisionError("the batch has no supervised position: 0/0 is no loss; skip it (R30)")
    width = n_scores(model.config)
    states, score = _supervised_states(model, work)
    loss, nll = _chunked(score, states, work.labels, (smoothing, z_loss), width)
    return Sums(loss, nll, _balance(model, work, loss), work.count)


def n_scores(cfg: config.ModelConfig) -> int:
    """Scores a state: rows of the output table, or labels."""
    head = cfg.head
    if isinstance(head, config.TokenHead):
        return cfg.embedding.vocab_size
    if isinstance(head, config.SequenceHead | config.TaggingHead):
        return head.n_labels
    raise ConfigError("head: the network scores nothing, so there is no loss to train it by; give it a head")


def smoothed_cross_entropy(
    scores: Float[Tensor, "positions classes"],
    labels: Int[Tensor, " positions"],
    smoothing: float,
    z_loss: float = 0.0,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Sum of -Σ q log p with q = (1 - η) onehot(label) + η/C (R34), and of -log p[label].

    With ``z_loss`` ζ the first also holds ζ (log Σ exp z)², which keeps the scores from drifting away from
    log-probabilities (Chowdhery et al. 2022, §5).

    Half precision is widened to float32. Beside the scores one tensor of their size is held: the
    probabilities from the forward to the backward pass, which makes the gradient of them.

    Returns:
        The smoothed loss, differentiable, and the plain negative log-likelihood, which is not.
    """
    wide = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores
    return _CrossEntropy.apply(wide, labels, smoothing, z_loss)  # pyright: ignore[reportReturnType]


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


def _supervised_states(model: Transformer, work: Work) -> tuple[Tensor, nn.Module]:
    """The states the labels belong to, and what turns them into scores."""
    if work.by_row:
        scores = model(work.tokens).logits
        if scores is None or scores.dim() != 2:
            raise ConfigError("one label a text needs a head of kind 'sequence_labels'")
        return scores.index_select(0, work.places), nn.Identity()
    memory = None if work.source is None else model.encode(work.source)
    states = model.hidden(work.tokens, memory=memory).flatten(0, 1).index_select(0, work.places)
    assert model.head is not None
    return states, model.head


def _chunked(
    head: nn.Module, states: Tensor, labels: Tensor, weights: tuple[float, float], width: int
) -> tuple[Tensor, Tensor]:
    """Scores of all positions at once where they are few, else piece by piece, recomputed in backward."""
    rows = max(CHUNK // width, 1)
    if len(states) <= rows:
        return smoothed_cross_entropy(head(states), labels, *weights)
    pieces = [
        checkpoint(_piece, head, some, theirs, weights, use_reentrant=False)
        for some, theirs in zip(states.split(rows), labels.split(rows), strict=True)
    ]
    losses, nlls = zip(*pieces, strict=True)
    return torch.stack(losses).sum(), torch.stack(nlls).sum()


def _piece(
    head: nn.Module, states: Tensor, labels: Tensor, weights: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    return smoothed_cross_entropy(head(states), labels, *weights)


def _balance(model: Transformer, work: Work, like: Tensor) -> Tensor:
    """The mean over the routers, each of them over the tokens that its stack has read."""
    read = {model.decoder: work.tokens, model.encoder: work.source or work.tokens}
    losses = [
        loss
        for stack, tokens in read.items()
        if stack is not None
        for module in stack.modules()
        if isinstance(module, Router) and (loss := module.balance(tokens.real)) is not None
    ]
    return torch.stack(losses).mean() if losses else like.new_zeros(())


class _CrossEntropy(torch.autograd.Function):
    """Exponentials are made once: the probabilities give the log-sum-exp, and backward starts from them."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, labels: Tensor, smoothing: float, z_loss: float
    ) -> tuple[Tensor, Tensor]:
        shares = scores.softmax(-1)
        # The largest share is at least 1/C, so its logarithm is exact where that of the label's may not be.
        total = scores.amax(-1) - shares.amax(-1).log()
        ctx.save_for_backward(shares, total, labels)
        ctx.weights = smoothing, z_loss
        nll = (total - scores.gather(-1, labels[:, None])[:, 0]).sum()
        loss = nll.clone()
        if smoothing:
            loss = (1 - smoothing) * nll + smoothing * (total - scores.mean(-1)).sum()
        if z_loss:
            loss = loss + z_loss * total.square().sum()
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        shares, total, labels = ctx.saved_tensors
        eta, zeta = ctx.weights
        gradient = shares * (grads[0] * (1 + 2 * zeta * total[:, None]) if zeta else grads[0])
        if eta:
            gradient -= grads[0] * (eta / shares.shape[-1])
        due = (grads[0] * (eta - 1)).expand(len(labels), 1)
        return gradient.scatter_add_(-1, labels[:, None], due), None, None, None
