"""Fitting any network to any batches, resumably: the entry below `isoform.training.train`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from isoform.config import ModelConfig, difference, difference_in_words
from isoform.config.base import Frozen
from isoform.config.files import read, write
from isoform.errors import ConfigError
from isoform.nn import Transformer
from isoform.training.group import present
from isoform.training.lock import locked
from isoform.training.loop import run_loop
from isoform.training.result import FitResult
from isoform.training.settings import Training
from isoform.training.updates import AnyBatches
from isoform.training.warm_start import adapt


class _Fit(Frozen):
    """What a folder was begun with."""

    model: ModelConfig
    training: Training


def fit(
    model: Transformer,
    train: AnyBatches,
    validation: AnyBatches | None,
    settings: Training,
    folder: Path,
    *,
    where: Callable[[int], str] = "record {}".format,
    quiet: bool = False,
) -> FitResult:
    """Train a network in place. The same call in the same folder goes on where an earlier one stopped, to the
    very same numbers, and returns at once where it had finished.

    Args:
        model: freshly built; its first weights must be the same at every call (`isoform.build` with a seed).
        train: batches to learn from; the same epoch must always give the same batches.
        validation: chooses the checkpoint and the stop.
        settings: everything else. ``batches`` and ``masking`` have been used by the caller.
        folder: holds checkpoints, ``log.csv`` and ``loss.png``.
        where: names the sample of a row, for messages.
        quiet: no bar and no remarks.

    Returns:
        How it ended. The network has the weights that validation chose; after a signal, the last ones.

    Raises:
        ConfigError: the folder belongs to another network or other settings, or to a process still running.
        SupervisionError: labels that leak (R23), inputs not shifted once (R24), or nothing supervised.
        DivergenceError: a loss or gradient that is not finite.
        ArtifactError: no checkpoint in the folder is whole.
    """
    group = present()
    with locked(folder, group):
        mine = _Fit(model=model.config, training=settings)
        group.from_first(lambda: agree(folder / "fit.toml", mine, free=("training.distributed",)))
        adapt(model, settings)
        return run_loop(model, train, validation, settings, folder, where=where, quiet=quiet)


def agree(path: Path, config: Frozen, *, free: Sequence[str] = ()) -> None:
    """Write down what a folder is begun with, or refuse to go on with something else.

    Args:
        path: where it is written down.
        config: what a process wants to go on with.
        free: fields that change nothing of what comes out, and may differ.

    Raises:
        ConfigError: the differences in words.
    """
    if not path.exists():
        write(config, path)
        return
    begun = read(type(config), path)
    other = [d for d in difference(begun, config) if not d.path.startswith(tuple(free))]
    if other if free else begun != config:
        differences = "; ".join(difference_in_words(begun, config))
        raise ConfigError(
            f"{path.parent}: was begun with another configuration (the first) than this one (the second):"
            f" {differences}; give the same one or another folder"
        )
