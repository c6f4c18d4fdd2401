"""The loss curve of a run, and those of an experiment."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from isoform.config.files import write_bytes
from isoform.training.log import Line

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    _write(figure, path)


def draw_ablation(curves: Mapping[str, Mapping[str, Sequence[Sequence[Line]]]], path: Path) -> None:
    """Draw the validation NLL over the steps: a panel a factor, a colour a value, a thin line a seed, and a
    strong one for their mean where all seeds have a validation."""
    from matplotlib.figure import Figure

    n = max(len(curves), 1)
    figure = Figure(figsize=(6 * n, 4.2), dpi=120, layout="constrained")
    for axes, (key, panel) in zip(figure.subplots(1, n, squeeze=False)[0], curves.items(), strict=False):
        for number, (value, seeds) in enumerate(panel.items()):
            color = f"C{number}"
            points: dict[int, list[float]] = {}
            for lines in seeds:
                seen = [(x.step, x.validation_nll) for x in lines if x.validation_nll is not None]
                axes.plot(
                    [step for step, _ in seen], [nll for _, nll in seen], color=color, lw=0.6, alpha=0.5
                )
                for step, nll in seen:
                    points.setdefault(step, []).append(nll)
            mean = sorted(
                (s, sum(found) / len(found)) for s, found in points.items() if len(found) == len(seeds)
            )
            axes.plot([s for s, _ in mean], [m for _, m in mean], color=color, marker=".", label=value)
        axes.set_title(key)
        axes.set_xlabel("step")
        axes.set_ylabel("validation NLL, nats a supervised position")
        axes.legend(frameon=False)
    _write(figure, path)


def _write(figure: Figure, path: Path) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_bytes(path, buffer.getvalue())
