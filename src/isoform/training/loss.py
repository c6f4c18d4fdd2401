"""What training minimises: sums over supervised positions, their number, and nothing else (Algorithm 6.1)."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from isoform import config
from isoform.data.batching import Batch, LabelledBatch
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
        found = cls(tokens, source, places, labels, by_row, real)
        return found if device is None else found.to(device)

    def to(self, device: torch.device | str) -> Work:
        """The same on another device."""
        source = None if self.source is None else self.source.to(device)
        moved = (self.tokens.to(device), source, self.places.to(device), self.labels.to(device))
        return Work(*moved, self.by_row, self.real_tokens)

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
    """Scores of all positions at once where they are few, else piece by piece."""
    rows = max(CHUNK // width, 1)
    if len(states) <= rows:
        return smoothed_cross_entropy(head(states), labels, *weights)
    if torch.is_grad_enabled():
        learnt = [p for p in head.parameters() if p.requires_grad]
        return _Pieces.apply(states, labels, (head, weights, rows), *learnt)  # pyright: ignore[reportReturnType]
    pieces = [
        smoothed_cross_entropy(head(some), theirs, *weights)
        for some, theirs in zip(states.split(rows), labels.split(rows), strict=True)
    ]
    losses, nlls = zip(*pieces, strict=True)
    return torch.stack(losses).sum(), torch.stack(nlls).sum()


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


class _Pieces(torch.autograd.Function):
    """The gradients of a piece are made with its scores, which nothing needs afterwards: a sum's gradient is
    known but for a factor (as in Hsu et al. 2024, Liger Kernel)."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        labels: Tensor,
        given: tuple[nn.Module, tuple[float, float], int],
        *learnt: Tensor,
    ) -> tuple[Tensor, Tensor]:
        head, weights, rows = given
        whole = torch.zeros_like(states)
        sums: list[Tensor | None] = [None] * len(learnt)
        pieces: list[tuple[Tensor, Tensor]] = []
        for some, theirs, part in zip(states.split(rows), labels.split(rows), whole.split(rows), strict=True):
            with torch.enable_grad():
                some = some.detach().requires_grad_()
                loss, nll = smoothed_cross_entropy(head(some), theirs, *weights)
            with torch.autocast(states.device.type, enabled=False):
                own, *found = torch.autograd.grad(loss, [some, *learnt], allow_unused=True)
            part.copy_(own)
            sums = [_plus(a, b) for a, b in zip(sums, found, strict=True)]
            pieces.append((loss.detach(), nll))
            del loss, own, found  # before the next ones are made
        ctx.save_for_backward(whole, *sums)
        losses, nlls = (torch.stack(values).sum() for values in zip(*pieces, strict=True))
        ctx.mark_non_differentiable(nlls)
        return losses, nlls

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved: list[Tensor | None] = [*ctx.saved_tensors]
        whole, *sums = [None if t is None else t * grads[0].to(t.dtype) for t in saved]
        return whole, None, None, *sums


def _plus(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    return total if more is None else more if total is None else total.add_(more)


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
