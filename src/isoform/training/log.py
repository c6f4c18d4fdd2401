"""The log of a run: a CSV file that survives interruptions; TensorBoard's and W&B's where asked for."""

from __future__ import annotations

import csv
import dataclasses
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from isoform.config.files import write_text
from isoform.errors import ConfigError
from isoform.training.settings import WandB


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of the log. Losses are means a supervised position, in nats.

    Attributes:
        step: updates made.
        epoch: passes through the data begun before, with the fraction of the present one.
        seconds: time spent training.
        train_loss: with smoothed labels, what is minimised (R34), without the routers' loss.
        train_nll: with the labels themselves; comparable with the validation's.
        validation_nll: on the validation part; None where there was no validation at this step.
        balance_loss: of the routers; None where there are none.
        learning_rate: of the last update.
        gradient_norm: of the last update, before clipping.
        tokens_per_second: ids read, padding left out, by all processes.
        waiting: share of the time in which the next batches were waited for.
        gradient_noise: the gradient noise scale in supervised positions; None unless asked for.
    """

    step: int
    epoch: float
    seconds: float
    train_loss: float | None
    train_nll: float | None
    validation_nll: float | None
    balance_loss: float | None
    learning_rate: float
    gradient_norm: float | None
    tokens_per_second: float | None
    waiting: float | None = None
    gradient_noise: float | None = None


COLUMNS = tuple(field.name for field in dataclasses.fields(Line))


class Sink(Protocol):
    """Where lines go."""

    def write(self, line: Line) -> None:
        """Add a line."""
        ...

    def close(self) -> None:
        """Finish."""
        ...


class CsvLog:
    """Lines appended to a file. Those after ``step``, which an interrupted run has written, are taken out.

    Args:
        path: the file.
        step: the step the run goes on from.
    """

    def __init__(self, path: Path, step: int) -> None:
        kept = [line for line in read_log(path) if line.step <= step] if step else []
        write_text(path, ",".join(COLUMNS) + "\n" + "".join(_row(line) for line in kept))
        self._path = path

    def write(self, line: Line) -> None:
        """Append a line."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_row(line))

    def close(self) -> None:
        """Nothing is held open."""


class TensorBoardLog:
    """The same lines as scalars.

    Raises:
        ConfigError: the package is not installed.
    """

    def __init__(self, folder: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(
                "training.tensorboard needs the package tensorboard: pip install 'isoform[tensorboard]'"
            ) from None
        self._writer: Any = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, line: Line) -> None:
        """Add a line's numbers."""
        for name in COLUMNS[3:]:
            value = getattr(line, name)
            if value is not None:
                self._writer.add_scalar(name, value, line.step)
        self._writer.flush()

    def close(self) -> None:
        """Finish the file."""
        self._writer.close()


class WandBLog:
    """The same lines at Weights & Biases, under the run's own step numbers.

    A run that goes on is the same run there: online it is continued, offline each process leaves a folder
    with the run's id, which ``wandb sync`` puts together in their order.

    Args:
        folder: the run's.
        settings: where it goes.
        hyperparameters: shown beside the curves.
        quiet: print nothing.

    Raises:
        ConfigError: the package is not installed.
    """

    def __init__(
        self, folder: Path, settings: WandB, hyperparameters: Mapping[str, Any], *, quiet: bool
    ) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ConfigError(
                "training.wandb needs the package wandb: pip install 'isoform[wandb]'"
            ) from None
        path = folder / "wandb.id"
        if not path.is_file():
            write_text(path, secrets.token_hex(8))
        self._run: Any = wandb.init(
            project=settings.project,
            name=settings.name,
            mode=settings.mode,
            dir=str(folder),
            id=path.read_text(encoding="utf-8"),
            resume="allow",
            config=dict(hyperparameters),
            settings=wandb.Settings(console="off", silent=quiet),  # the terminal is the run's own
        )

    def write(self, line: Line) -> None:
        """Add a line's numbers."""
        found = {name: value for name in COLUMNS[1:] if (value := getattr(line, name)) is not None}
        self._run.log(found, step=line.step)

    def close(self) -> None:
        """Finish the run's record."""
        self._run.finish()


def read_log(path: Path) -> list[Line]:
    """The lines of a CSV log; a line cut off by a crash is left out."""
    if not path.is_file():
        return []
    found: list[Line] = []
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            try:
                values = {name: None if row[name] == "" else float(row[name]) for name in COLUMNS}
                found.append(Line(**{**values, "step": int(row["step"])}))  # pyright: ignore[reportArgumentType]
            except (TypeError, ValueError, KeyError):
                continue
    return found


def _row(line: Line) -> str:
    values = dataclasses.astuple(line)
    return ",".join("" if v is None else str(v) if isinstance(v, int) else f"{v:.9g}" for v in values) + "\n"
