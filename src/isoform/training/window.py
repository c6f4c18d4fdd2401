"""Sums between two lines of the log."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from isoform.training.group import ALONE, Group
from isoform.training.log import Line


class Window:
    """Sums since the last line of the log, on the device, so that nothing waits for it.

    Losses are this process's own until a line or a checkpoint asks for those of all; counts are global.

    Args:
        device: where the run computes.
        group: the processes; the first carries what was saved.
        saved: what `to_dict` gave in the middle of a window.
    """

    def __init__(
        self, device: torch.device, group: Group = ALONE, saved: Mapping[str, float] | None = None
    ) -> None:
        before = saved or {}
        self._group = group
        wide = torch.float32 if device.type == "mps" else torch.float64
        self.loss, self.nll, self.balance = (
            torch.tensor(before.get(name, 0.0) if group.first else 0.0, dtype=wide, device=device)
            for name in ("loss", "nll", "balance")
        )
        norm = before.get("norm")
        self.norm: Tensor | None = None if norm is None else torch.tensor(norm, dtype=wide, device=device)
        self.rate = before.get("rate", 0.0)
        self.count, self.tokens, self.updates = (
            int(before.get(n, 0)) for n in ("count", "tokens", "updates")
        )
        self.waiting = before.get("waiting", 0.0)  # seconds in which the next batches were waited for
        self.noise: float | None = None  # the gradient noise scale as last estimated
        self._start = time.perf_counter() - before.get("seconds", 0.0)

    def to_dict(self) -> dict[str, float]:
        """The sums as plain numbers; nothing for a window just opened."""
        if not self.updates:
            return {}
        sums = dict(zip(("loss", "nll", "balance"), self._sums(), strict=True))
        norm = {} if self.norm is None else {"norm": float(self.norm)}
        counts = {"count": self.count, "tokens": self.tokens, "updates": self.updates}
        return {
            **sums,
            **norm,
            **counts,
            "rate": self.rate,
            "waiting": self.waiting,
            "seconds": self.seconds(),
        }

    def _sums(self) -> list[float]:
        return self._group.total([float(self.loss), float(self.nll), float(self.balance)])

    def add(self, loss: Tensor, nll: Tensor, balance: Tensor, micro: int) -> None:
        """A micro-batch was run; ``micro`` is how many make an update."""
        self.loss = self.loss + loss
        self.nll = self.nll + nll
        self.balance = self.balance + balance / micro

    def end(self, count: int, tokens: int, norm: Tensor, lr: float) -> None:
        """An update was made."""
        self.count += count
        self.tokens += tokens
        self.updates += 1
        self.norm, self.rate = norm, lr

    def seconds(self) -> float:
        """How long the window is open."""
        return time.perf_counter() - self._start

    def line(self, step: int, epoch: float, seconds: float, *, routed: bool) -> Line:
        """The line of the log that the sums come to; here the device is waited for."""
        n = self.count
        loss, nll, balance = self._sums()
        return Line(
            step=step,
            epoch=epoch,
            seconds=seconds,
            train_loss=loss / n if n else None,
            train_nll=nll / n if n else None,
            validation_nll=None,
            balance_loss=balance / self.updates if routed and n else None,
            learning_rate=self.rate,
            gradient_norm=None if self.norm is None else float(self.norm),
            tokens_per_second=self.tokens / self.seconds() if n else None,
            waiting=self.waiting / self.seconds() if n else None,
            gradient_noise=self.noise,
        )
