"""A whole run: data, tokenizers, network, training, the test read once, the artifact."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isoform.config.files import read, write, write_text
from isoform.data import Prepared, Task, Tokenizer, Tokenizers, prepare
from isoform.data import check as data_check
from isoform.data.pipeline import Checked
from isoform.errors import ConfigError
from isoform.nn import Transformer, build
from isoform.training.config import Pretrained, RunConfig, Vocabularies
from isoform.training.fit import agree
from isoform.training.group import joined
from isoform.training.lock import locked
from isoform.training.loop import run_loop
from isoform.training.preflight import RunPreflight, preflight
from isoform.training.protocol import protocol_of
from isoform.training.result import FitResult
from isoform.training.run_folder import (
    RESULT,
    Ended,
    digests,
    forget_false_start,
    refuse_changed_data,
    result_folder,
)
from isoform.training.trial import Trial
from isoform.training.warm_start import Start, adapt, begin_from, open_start, refuse_idle, save_adapter


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
        folder: holds everything.
        fit: the training itself.
        test: metrics of the test part by name, each with its signature; None without a test part, or when the
            run was interrupted.
        artifact: folder of the finished network; None when the run was interrupted.
    """

    folder: Path
    fit: FitResult
    test: Mapping[str, Any] | None
    artifact: Path | None

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return self.artifact is not None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        fit = self.fit
        return {
            "folder": str(self.folder),
            "finished": self.finished,
            "stop": fit.stop,
            "step": fit.state.step,
            "seconds": {"train": fit.state.seconds, "waiting_for_data": fit.state.waited},
            "precision": fit.precision,
            "weights": fit.weights,
            "best_step": fit.state.best_step,
            "skipped_batches": fit.state.skipped,
            "validation": {"nll": fit.validation_nll},
            "test": None if self.test is None else dict(self.test),
            "artifact": None if self.artifact is None else str(self.artifact),
        }


def train(run: RunConfig, folder: Path, *, base: Path, quiet: bool = False) -> TrainResult:
    """Carry out a run; the same call in the same folder goes on where an earlier one was stopped.

    Under ``torchrun`` all processes share the run; the first alone writes, but for checkpoints in pieces.

    Args:
        run: the run file.
        folder: where everything is written: ``request.toml`` (the run as asked for), ``run.toml`` (with the
            network written out), ``tokenizer*``, ``preflight.json``, ``checkpoints/``, ``log.csv``,
            ``loss.png``, ``result.json`` and ``artifact/`` (with lora ``adapter/``).
        base: the folder that the data's relative paths start from.
        quiet: no bar and no remarks.

    Raises:
        IsoformError: bad data, settings that do not go together, a folder of another run, a loss that is not
            finite; nothing half-written is left.
    """
    with joined(run.training.device) as group, locked(folder, group):
        begun = group.from_first(lambda: _begin(run, folder, base, alone=group.alone))
        # Where there are several processes, the first has left the tokenizers in the folder.
        setup = set_up(run, base, _saved_tokenizers(folder)) if begun is None else begun
        trial = group.from_first(lambda: _try(run, folder, setup, quiet=quiet))
        parts = setup.prepared
        fit = run_loop(
            setup.model,
            parts.train.batches,
            None if parts.validation is None else parts.validation.batches,
            run.training,
            folder,
            where=parts.train.where,
            quiet=quiet,
            trial=trial,
        )
        if not fit.finished:
            return TrainResult(folder, fit, None, None)
        if not group.first:  # the test is read and the artifact written once
            return TrainResult(folder, fit, None, result_folder(run, folder))
        return _conclude(run, folder, setup, fit, quiet=quiet)


def _begin(run: RunConfig, folder: Path, base: Path, *, alone: bool) -> Setup | None:
    """Write down what the folder is begun with. Returns what was read, where nobody else needs it too."""
    forget_false_start(folder)
    agree(folder / "request.toml", run, free=("training.distributed",))
    saved = _saved_tokenizers(folder)
    setup = set_up(run, base, saved)
    if saved is None:
        _save_tokenizers(folder, setup.prepared.tokenizers)
    refuse_changed_data(folder, setup.prepared)
    network = run.model if setup.start is not None else setup.model.config
    write(run.model_copy(update={"model": network}), folder / "run.toml")
    return setup if alone else None


def _try(run: RunConfig, folder: Path, setup: Setup, *, quiet: bool) -> Trial | None:
    """The preflight of a run that has not begun."""
    if (folder / "checkpoints").is_dir():
        return None
    report = preflight(setup.model, setup.prepared, run.training)
    write_text(folder / "preflight.json", json.dumps(report.to_dict(), ensure_ascii=False) + "\n")
    said = [] if setup.start is None else setup.start.transplant.sentences()
    for remark in () if quiet else (*said, *report.remarks):
        print(remark, file=sys.stderr)
    return report.trial


def inspect_data(run: RunConfig, *, base: Path) -> Checked:
    """The first half of the preflight: what there is to say of the data, faults of single records included.

    Raises:
        IsoformError: files that cannot be read, tokenizers that cannot be made.
    """
    if isinstance(run.model, Pretrained):
        start = open_start(run.model, run.data, base)
        return data_check(_task(run, base, start), start.tokenizers)
    assert run.tokenizer is not None
    return data_check(_task(run, base), run.tokenizer)


def check(run: RunConfig, *, base: Path, tokenizers: Tokenizers | None = None) -> RunPreflight:
    """The preflight of a run, without writing anything.

    Args:
        run: the run file.
        base: the folder that the data's relative paths start from.
        tokenizers: those that `inspect_data` made.

    Raises:
        IsoformError: what would stop the run.
    """
    setup = set_up(run, base, tokenizers)
    return preflight(setup.model, setup.prepared, run.training)


@dataclasses.dataclass(frozen=True)
class Setup:
    """The network and what it is to read; with where it starts from, unless that is random weights."""

    prepared: Prepared
    model: Transformer
    start: Start | None = None


def set_up(run: RunConfig, base: Path, tokenizers: Tokenizers | None) -> Setup:
    """Read the data, make the tokenizers unless they are there, and the network as it begins."""
    start = None
    if isinstance(run.model, Pretrained):
        start = open_start(run.model, run.data, base)
        prepared = prepare(_task(run, base, start), tokenizers or start.tokenizers)
        start, model = begin_from(start, run.model, run.training.seed, len(prepared.classes))
    else:
        assert run.tokenizer is not None
        prepared = prepare(_task(run, base), tokenizers or run.tokenizer)
        model = build(run.architecture(_sizes(prepared)), seed=run.training.seed)
    adapt(model, run.training)
    if start is not None:
        refuse_idle(start.transplant.new, model)
    return Setup(prepared, model, start)


def _sizes(prepared: Prepared) -> Vocabularies:
    made = prepared.tokenizers
    return Vocabularies(
        target=made.target.vocab_size,
        source=made.source.vocab_size,
        shared=made.shared,
        labels=len(prepared.classes),
    )


def _task(run: RunConfig, base: Path, start: Start | None = None) -> Task:
    settings = run.training
    first = None if start is None else start.start_id
    return Task(
        run.data, settings.batches, base, settings.order_seed, start_id=first, masking=settings.masking
    )


def _conclude(run: RunConfig, folder: Path, setup: Setup, fit: FitResult, *, quiet: bool) -> TrainResult:
    """Read the test, once in the run's life, and write the artifact."""
    from isoform.checkpoints import Bundle
    from isoform.training.scoring import score

    artifact, path = result_folder(run, folder), folder / RESULT
    if path.is_file() and artifact.is_dir():
        return TrainResult(folder, fit, read(Ended, path).test, artifact)
    prepared = setup.prepared
    made = prepared.tokenizers
    start = setup.start
    protocol = protocol_of(prepared.task, made) if start is None else start.protocol(prepared.task, made)
    bundle = Bundle(setup.model, setup.model.config, made.target, made.source, protocol)
    test = score(bundle, prepared, run.evaluation, quiet=quiet)
    result = {
        "fit": {
            **{k: v for k, v in fit.state.to_dict().items() if k not in ("window", "position")},
            "stop": fit.stop,
            "weights": fit.weights,
            "validation_nll": fit.validation_nll,
            "precision": fit.precision,
        },
        "test": test,
    }
    provenance = {
        **result,
        "data": {**digests(prepared), "config": run.data.model_dump(mode="json")},
        "training": run.training.model_dump(mode="json"),
        "labels": sorted(prepared.classes, key=prepared.classes.__getitem__),
        **({} if start is None else {"start": start.to_dict()}),
    }
    bundle = dataclasses.replace(bundle, provenance=provenance)
    if run.training.lora is None:
        bundle.save(artifact)
    else:
        assert start is not None  # `RunConfig` lets nothing else have adapters
        save_adapter(bundle, artifact, start, run.training)
    write_text(path, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return TrainResult(folder, fit, test, artifact)


def _save_tokenizers(folder: Path, made: Tokenizers) -> None:
    for name, tokenizer in (("tokenizer", made.target), ("source_tokenizer", made.source)):
        path = folder / f"{name}{tokenizer.backend.suffix}"
        if path.exists() and not (folder / f"{name}.specials.json").is_file():
            raise ConfigError(f"{path}: there already, and not of a run; choose another folder for the run")
    if made.source is not made.target:
        made.source.save(folder, "source_tokenizer")
    made.target.save(folder, "tokenizer")


def _saved_tokenizers(folder: Path) -> Tokenizers | None:
    # The target's is written last: where it is, both are.
    if not (folder / "tokenizer.specials.json").is_file():
        return None
    target = Tokenizer.load(folder, "tokenizer")
    own = (folder / "source_tokenizer.specials.json").is_file()
    return Tokenizers(Tokenizer.load(folder, "source_tokenizer") if own else target, target)
