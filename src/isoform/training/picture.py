"""The loss curve of a run."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from isoform.config.files import write_bytes
from isoform.training.log import Line


def draw_losses(lines: Sequence[Line], path: Path, *, best_step: int | None) -> None:
    """Draw what the log says: training loss with smoothed labels, training NLL, validation NLL.

    The first is another quantity than the other two (R34), and is drawn only where it differs.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120)
    axes = figure.add_axes((0.1, 0.13, 0.86, 0.82))
    train = [line for line in lines if line.train_nll is not None]
    if any(line.train_loss != line.train_nll for line in train):
        axes.plot(
            [line.step for line in train],
            [line.train_loss or 0.0 for line in train],
            color="0.75",
            label="training loss, labels smoothed",
        )
    axes.plot(
        [line.step for line in train],
        [line.train_nll or 0.0 for line in train],
        color="C0",
        label="training NLL",
    )
    seen = [line for line in lines if line.validation_nll is not None]
    if seen:
        axes.plot(
            [line.step for line in seen],
            [line.validation_nll or 0.0 for line in seen],
            color="C1",
            marker=".",
            label="validation NLL",
        )
    if best_step is not None:
        axes.axvline(best_step, color="0.6", linestyle=":", linewidth=1, label=f"best, step {best_step}")
    axes.set_xlabel("step")
    axes.set_ylabel("nats a supervised position")
    if train or seen:
        axes.legend(frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_bytes(path, buffer.getvalue())
