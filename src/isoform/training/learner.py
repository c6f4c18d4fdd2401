"""A network together with what it minimises: the unit that is called, replicated or sharded."""

from __future__ import annotations

from torch import Tensor, nn

from isoform.nn import Transformer
from isoform.training.loss import Work, batch_loss
from isoform.training.settings import Training


class Learner(nn.Module):
    """Work in, sums out.

    Args:
        model: the network.
        smoothing: eta of the smoothed labels (R34).
        z_loss: weight of the squared log-sum-exp; see `isoform.training.loss.batch_loss`.
        sharded: whether the weights lie in pieces on several processes.
    """

    def __init__(self, model: Transformer, *, smoothing: float, z_loss: float, sharded: bool = False) -> None:
        super().__init__()
        self.model, self.smoothing, self.z_loss, self.sharded = model, smoothing, z_loss, sharded

    @classmethod
    def of(cls, model: Transformer, settings: Training) -> Learner:
        """The learner that the run file asks for, whole."""
        return cls(model, smoothing=settings.label_smoothing, z_loss=settings.z_loss)

    def forward(self, work: Work) -> tuple[Tensor, Tensor, Tensor]:
        """The loss' sum, the NLL's sum and the routers' mean loss; see `isoform.training.loss.Sums`.

        Plain tensors in a tuple, because hooks of a sharded network look for them there.
        """
        sums = batch_loss(self.model, work, smoothing=self.smoothing, z_loss=self.z_loss)
        return sums.loss, sums.nll, sums.balance
