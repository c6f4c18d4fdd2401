"""One factor at a time from one base, over several seeds, on the same data in the same order (R17)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from isoform.config import read
from isoform.config.base import Frozen
from isoform.config.difference import difference_in_words
from isoform.config.files import write_text
from isoform.cost import parameters
from isoform.errors import ConfigError
from isoform.training.config import RunConfig, read_run
from isoform.training.contrast import Spread, paired_difference
from isoform.training.factors import Factor, expanded, varied
from isoform.training.findings import Ablation, Finding, Outcome, Variant
from isoform.training.fit import agree
from isoform.training.group import Group, joined
from isoform.training.guard import DivergenceError
from isoform.training.log import Line, read_log
from isoform.training.picture import draw_ablation
from isoform.training.run_folder import RESULT, Ended, result_folder
from isoform.training.train import train

DIVERGED = "diverged.json"
BASE = "base"


class Diverged(Frozen):
    """``diverged.json``."""

    statement: str
    """Why there is no NLL."""


def plan(path: Path, overrides: Sequence[str], factors: Sequence[Factor], *, matched: bool) -> list[Variant]:
    """The base and every value of every factor, checked to change that one setting only.

    Args:
        path: the run file of the base.
        overrides: settings that replace the file's.
        factors: what is varied.
        matched: whether gated networks are made as wide as costs what two-layer ones do (R10).

    Raises:
        ConfigError: a run file that fixes no number of updates or has no validation to compare by, a factor
            twice, or a value that changes more than one setting.
    """
    base = read_run(path, overrides)
    _refuse_unequal_ends(base, path)
    if len({factor.key for factor in factors}) < len(factors):
        raise ConfigError("--vary: a setting stands there twice; put its values together")
    if not factors:
        raise ConfigError("--vary: nothing is varied; expected key=value,value,…")
    # The data's order comes from the base's seed in every run.
    base = base.replace(**{"training.data_seed": base.training.order_seed, "evaluation.metrics": ()})
    kept = [*overrides, f"training.data_seed={base.training.data_seed}", "evaluation.metrics=[]"]
    found = [Variant(BASE, None, None, base, (), True)]
    for factor in factors:
        for value in factor.values:
            run, differences = varied(path, kept, base, factor.key, value, matched=matched)
            _refuse_unequal_ends(run, path)
            name = f"{factor.key}={value}"
            if "/" in name:
                raise ConfigError(f"--vary {name}: a value with / cannot name a folder")
            words = _words(base, run) if differences else ()
            found.append(Variant(name, factor.key, value, run, words, not differences))
    return found


def ablate(
    variants: Sequence[Variant],
    seeds: Sequence[int],
    folder: Path,
    *,
    base: Path,
    quiet: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Ablation:
    """Carry out the runs that are not done yet, seed by seed, and compare.

    A run that diverges is a result like any other. The test part is not read: the choice between variants is
    validation's (R35). Under ``torchrun`` all processes share every run; the first alone writes.

    Args:
        variants: from `plan`.
        seeds: of weights and dropout.
        folder: each run gets ``folder/NAME/seed-N``.
        base: the folder that the data's relative paths start from.
        quiet: no bars.
        say: takes a line before each run.

    Raises:
        IsoformError: as `isoform.training.train`; a folder that holds other runs.
    """
    if len(set(seeds)) < len(seeds) or not seeds:
        raise ConfigError(f"--seeds: {list(seeds)}: expected at least one, each once")
    todo = [(seed, v) for seed in seeds for v in variants if v.key is None or not v.is_base]
    signal = None
    done: dict[str, list[Outcome]] = {}
    with joined(variants[0].run.training.device) as group:
        for number, (seed, variant) in enumerate(todo, 1):
            place = folder / variant.name / f"seed-{seed}"
            run = variant.run.replace(**{"training.seed": seed})
            found = group.from_first(partial(_ended, place, run, seed))
            if found is None:
                if group.first:
                    say(f"run {number} of {len(todo)}: {variant.name}, seed {seed}")
                found, signal = _carry_out(place, run, seed, base, quiet, group)
                if found is None:
                    break
            done.setdefault(variant.name, []).append(found)
        result = Ablation(folder, tuple(seeds), _findings(variants, done, folder, len(seeds)), signal)
        if signal is None:
            group.from_first(lambda: _write(result))
    return result


def _write(result: Ablation) -> None:
    plain = json.dumps(result.to_dict(), indent=1, ensure_ascii=False) + "\n"
    write_text(result.folder / "ablation.json", plain)
    draw_ablation(_curves(result), result.folder / "ablation.png")


def _refuse_unequal_ends(run: RunConfig, path: Path) -> None:
    settings = run.training
    if settings.steps is None and settings.epochs is None:
        raise ConfigError(f"{path}: runs that only time ends are not comparable: set training.steps")
    if settings.max_seconds is not None:
        raise ConfigError(
            f"{path}: training.max_seconds would end runs after unequal numbers of updates; leave it out"
        )
    data = run.data
    if data.kind == "dates":
        return
    if data.validation is None and (data.split is None or not data.split.validation):
        raise ConfigError(f"{path}: variants are compared by validation, and the data have no such part")


def _words(base: RunConfig, run: RunConfig) -> tuple[str, ...]:
    network = difference_in_words(expanded(base), expanded(run))
    return (*network, *difference_in_words(base.model_copy(update={"model": run.model}), run))


def _ended(place: Path, run: RunConfig, seed: int) -> Outcome | None:
    """What a run that was done before has left.

    Raises:
        ConfigError: the folder holds another run.
    """
    request, diverged, result = place / "request.toml", place / DIVERGED, place / RESULT
    if not (diverged.is_file() or (result.is_file() and result_folder(run, place).is_dir())):
        return None
    agree(request, run)
    if diverged.is_file():
        return Outcome(seed, None, None, None, read(Diverged, diverged).statement)
    fit = read(Ended, result).fit
    return Outcome(seed, fit.validation_nll, fit.step, fit.seconds, None)


def _carry_out(
    place: Path, run: RunConfig, seed: int, base: Path, quiet: bool, group: Group
) -> tuple[Outcome | None, int | None]:
    try:
        result = train(run, place, base=base, quiet=quiet)
    except DivergenceError as error:
        said = str(error)
        if not group.from_first((place / "request.toml").is_file):
            raise  # before anything was begun
        plain = json.dumps({"statement": said}, ensure_ascii=False) + "\n"
        group.from_first(lambda: write_text(place / DIVERGED, plain))
        return Outcome(seed, None, None, None, said), None
    if not result.finished:
        return None, result.fit.signal
    # The first process has yet to score and to write when the others are here.
    return group.from_first(lambda: _ended(place, run, seed)), None


def _findings(
    variants: Sequence[Variant], done: Mapping[str, list[Outcome]], folder: Path, n_seeds: int
) -> tuple[Finding, ...]:
    reference = {o.seed: o.nll for o in done.get(BASE, ()) if o.nll is not None}
    found: list[Finding] = []
    for variant in variants:
        outcomes = done.get(BASE if variant.is_base else variant.name, [])
        if len(outcomes) < n_seeds:
            continue  # it was stopped in between
        nll = {o.seed: o.nll for o in outcomes if o.nll is not None}
        found.append(
            Finding(
                variant=variant,
                parameters=_parameters(variant, folder, outcomes[0].seed),
                outcomes=tuple(outcomes),
                nll=Spread.of(list(nll.values())),
                difference=None if variant.is_base else paired_difference(reference, nll),
            )
        )
    return tuple(found)


def _parameters(variant: Variant, folder: Path, seed: int) -> int:
    place = folder / (BASE if variant.is_base else variant.name) / f"seed-{seed}"
    return parameters(expanded(read(RunConfig, place / "run.toml"))).total


def _curves(result: Ablation) -> dict[str, dict[str, list[list[Line]]]]:
    """The validation curves of every seed, by factor and value; the base stands with each factor."""
    curves: dict[str, dict[str, list[list[Line]]]] = {}
    base = [read_log(result.folder / BASE / f"seed-{seed}" / "log.csv") for seed in result.seeds]
    for finding in result.findings[1:]:
        variant = finding.variant
        panel = curves.setdefault(str(variant.key), {})
        if variant.is_base:
            panel[f"{variant.value} (base)"] = base
            continue
        panel[str(variant.value)] = [
            read_log(result.folder / variant.name / f"seed-{seed}" / "log.csv") for seed in result.seeds
        ]
    for key, panel in curves.items():
        if not any(f.variant.is_base for f in result.findings[1:] if f.variant.key == key):
            panel[BASE] = base
    return curves
