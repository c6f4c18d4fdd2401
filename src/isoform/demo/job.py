"""The main job from data to proof. Each step is the library's own, in the order a user would take them."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isoform.config.files import write_text

if TYPE_CHECKING:
    from isoform.checkpoints import Bundle
    from isoform.cost.parameters import Parameters
    from isoform.data.dates import DatedPair
    from isoform.evaluation import Score
    from isoform.training import RunConfig, TrainResult
    from isoform.verify import Check
    from isoform.verify.trace import Trace

# Lines to look at: one of each direction that a reader may know, and some that few can read.
SHOWN = (
    ">>iso<< Tuesday, March 9, 2021",
    ">>de<< Tuesday, March 9, 2021",
    ">>zh<< vendredi 14 juillet 1989",
    ">>ar<< 1999年12月31日",
    ">>ja<< воскресенье, 1 февраля 2004\u202fг.",
    ">>hi<< 24 de dezembro de 2030",
)
AUDITED = (
    "causality",
    "padding-left",
    "padding-right",
    "cross-padding",
    "batch-independence",
    "cache",
    "eval-determinism",
    "paths",
    "masked-rows",
    "normalisation",
    "ties",
    "reload",
)


@dataclasses.dataclass(frozen=True, eq=False)
class DemoResult:
    """All that the job found out.

    Attributes:
        run: what was asked for.
        training: how it was trained.
        bundle: the model, loaded back from its artifact.
        scores: metrics of the unseen dates by name, each with its value and signature.
        by_pair: exact match by (source language, target language).
        parameters: in closed form; ``counted`` is the real module's number.
        counted: parameters of the real module.
        checks: the golden probe and the audit.
        translations: (what was asked, what came out).
        trace: one translation looked into.
        seconds: wall-clock seconds by step.
    """

    run: RunConfig
    training: TrainResult
    bundle: Bundle
    scores: dict[str, Score]
    by_pair: dict[tuple[str, str], float]
    parameters: Parameters
    counted: int
    checks: tuple[Check, ...]
    translations: tuple[tuple[str, str], ...]
    trace: Trace
    seconds: dict[str, float]

    @property
    def passed(self) -> bool:
        """Every check holds, and formula and count agree."""
        return all(check.passed for check in self.checks) and self.parameters.total == self.counted

    def to_dict(self) -> dict[str, Any]:
        """Plain data with stable keys: what ``demo.json`` holds."""
        return {
            "test": {name: score.value for name, score in self.scores.items()},
            "signatures": {name: score.signature for name, score in self.scores.items()},
            "exact_match_by_pair": {f"{a}-{b}": share for (a, b), share in sorted(self.by_pair.items())},
            "parameters": {
                "counted": self.counted,
                "closed_form": self.parameters.total,
                "components": self.parameters.to_dict()["components"],
            },
            "checks": [dataclasses.asdict(check) for check in self.checks],
            "translations": [{"source": a, "translation": b} for a, b in self.translations],
            "seconds": {name: round(value, 2) for name, value in self.seconds.items()},
            "passed": self.passed,
        }


def configuration(overrides: Sequence[str] = ()) -> RunConfig:
    """The run file that ships with the package, with some ``key=value`` changes."""
    from isoform.training import read_run

    with resources.as_file(resources.files("isoform.demo") / "dates.toml") as path:
        return read_run(path, overrides)


def run(
    folder: Path,
    *,
    config: RunConfig | None = None,
    say: Callable[[str], None] = lambda _: None,
    quiet: bool = False,
) -> DemoResult:
    """Do the whole job and write ``demo.json`` and ``demo.html`` into a folder.

    Args:
        folder: gets the run, the artifact and the two files; a finished run in it is not trained again.
        config: another run file of the same kind; default: the one that ships with the package.
        say: told what is being done.
        quiet: no progress bars.

    Raises:
        IsoformError: the folder holds another run.
    """
    from isoform.checkpoints import load
    from isoform.cost.parameters import parameters
    from isoform.data.dates import corpus_from
    from isoform.training import train

    config = configuration() if config is None else config
    clock = _Clock()
    say("training")
    trained = train(config, folder / "run", base=folder, quiet=quiet)
    clock.lap("prepare_and_train")
    assert trained.artifact is not None
    say("loading the artifact back and running its probe again")
    bundle = load(trained.artifact, check=True)
    clock.lap("reload")
    say("translating dates that training never saw")
    test = corpus_from(config.data).test  # pyright: ignore[reportArgumentType]
    answers = bundle.generate([p.source for p in test.items], max_new_tokens=config.evaluation.max_new_tokens)
    scores, by_pair = _score(test.items, answers)
    clock.lap("evaluate")
    say("auditing the trained model")
    checks = (_probe(bundle), *_audit(bundle, test.items[:3]))
    clock.lap("audit")
    shown = tuple(
        zip(SHOWN, bundle.generate(SHOWN, max_new_tokens=config.evaluation.max_new_tokens), strict=True)
    )
    looked = _look(bundle, *shown[1])
    counted = sum(p.numel() for p in bundle.model.parameters())
    seconds = {"train": trained.fit.state.seconds, **clock.laps, "total": clock.total()}
    result = DemoResult(
        config,
        trained,
        bundle,
        scores,
        by_pair,
        parameters(bundle.config),
        counted,
        checks,
        shown,
        looked,
        seconds,
    )
    from isoform.demo.page import write_page

    write_page(result, folder / "demo.html")
    write_text(folder / "demo.json", json.dumps(result.to_dict(), indent=1, ensure_ascii=False) + "\n")
    return result


def _score(
    test: Sequence[DatedPair], answers: Sequence[str]
) -> tuple[dict[str, Score], dict[tuple[str, str], float]]:
    from isoform.evaluation import bleu, chrf, exact_match

    wanted = [pair.target for pair in test]
    exact = exact_match(answers, wanted)
    groups = exact.groups([f"{pair.source_language} {pair.target_language}" for pair in test])
    scores = [counted.score() for counted in (exact, chrf(answers, wanted), bleu(answers, wanted))]
    by_pair = {(name.split()[0], name.split()[1]): score.value for name, score in groups.items()}
    return {score.name: score for score in scores}, by_pair


def _probe(bundle: Bundle) -> Check:
    """The golden probe that was run on loading, told like the other checks."""
    from isoform.verify import Check

    report = bundle.report
    assert report is not None  # load(check=True) raises where it does not hold
    return Check(
        "golden-probe",
        True,
        "the reloaded artifact gives the recorded activations, first logits and first greedy tokens",
        dataclasses.asdict(report),
    )


def _audit(bundle: Bundle, pairs: Sequence[DatedPair]) -> tuple[Check, ...]:
    from isoform.tokens import Tokens
    from isoform.verify import audit

    assert bundle.tokenizer is not None and bundle.source_tokenizer is not None
    protocol = bundle.protocol
    sources = bundle.source_tokenizer.encode_batch([pair.source for pair in pairs])
    targets = bundle.tokenizer.encode_batch([pair.target for pair in pairs])
    read = [[*protocol.source_prefix, *ids, *protocol.source_suffix] for ids in sources]
    # Rows cut to unequal lengths: ragged padding is part of what is asked.
    written = [[*protocol.start, *ids][: 7 + 3 * row] for row, ids in enumerate(targets)]
    inputs = {
        "tokens": Tokens.from_lists(written, pad_id=protocol.pad_id),
        "source": Tokens.from_lists(read, pad_id=protocol.pad_id),
    }
    return audit(bundle.model, inputs, checks=AUDITED).checks


def _look(bundle: Bundle, asked: str, answer: str) -> Trace:
    from isoform.tokens import Tokens
    from isoform.verify.trace import trace

    assert bundle.tokenizer is not None and bundle.source_tokenizer is not None
    protocol = bundle.protocol
    read = [*protocol.source_prefix, *bundle.source_tokenizer.encode(asked), *protocol.source_suffix]
    written = [*protocol.start, *bundle.tokenizer.encode(answer)]
    pad = protocol.pad_id
    return trace(
        bundle.model, Tokens.from_lists([written], pad_id=pad), Tokens.from_lists([read], pad_id=pad)
    )


class _Clock:
    def __init__(self) -> None:
        self._begun = self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now

    def total(self) -> float:
        return time.perf_counter() - self._begun
