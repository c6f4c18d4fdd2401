"""What an ablation compares, and what may be said of it (R17)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from isoform.training.config import RunConfig
from isoform.training.contrast import Spread, limits, sentence


@dataclasses.dataclass(frozen=True)
class Variant:
    """One value of one factor.

    Attributes:
        name: ``key=value``, or ``base``.
        key: what is varied; None for the base.
        value: what it is.
        run: the run file.
        changes: what separates it from the base, in words.
        is_base: whether it says what the base says, whose runs then serve it.
    """

    name: str
    key: str | None
    value: Any
    run: RunConfig
    changes: tuple[str, ...]
    is_base: bool


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one run of a variant ended.

    Attributes:
        seed: of its weights and dropout.
        nll: validation NLL of the weights it ended with; None when it diverged.
        steps: updates made.
        seconds: of training; None when it diverged.
        statement: why it has no NLL.
    """

    seed: int
    nll: float | None
    steps: int | None
    seconds: float | None
    statement: str | None


@dataclasses.dataclass(frozen=True)
class Finding:
    """A variant with what its seeds gave.

    Attributes:
        variant: which.
        parameters: of its network.
        outcomes: one a seed.
        nll: over the seeds that ended.
        difference: to the base, seed by seed; None for the base and where no seed ended in both.
    """

    variant: Variant
    parameters: int
    outcomes: tuple[Outcome, ...]
    nll: Spread | None
    difference: Spread | None

    @property
    def n_diverged(self) -> int:
        """How many seeds did not end."""
        return sum(outcome.nll is None for outcome in self.outcomes)


@dataclasses.dataclass(frozen=True)
class Ablation:
    """The whole experiment.

    Attributes:
        folder: where the runs are, with ``ablation.json`` and ``ablation.png``.
        seeds: of each variant.
        findings: the base first.
        signal: the signal that stopped it, if one did; then there are findings of whole variants only.
    """

    folder: Path
    seeds: tuple[int, ...]
    findings: tuple[Finding, ...]
    signal: int | None

    def may(self) -> list[str]:
        """What may be concluded, a sentence a comparison."""
        base = self.findings[0].parameters if self.findings else 0
        said: list[str] = []
        for finding in self.compared():
            line = sentence(finding.variant.name, finding.difference, finding.n_diverged, len(self.seeds))
            share = finding.parameters / base - 1
            said.append(line if not share else f"{line}; it has {share:+.2%} parameters")
        return said

    def may_not(self) -> str:
        """What may not."""
        return limits(len(self.compared()))

    def compared(self) -> list[Finding]:
        """What is held against the base."""
        return [finding for finding in self.findings if not finding.variant.is_base]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "seeds": list(self.seeds),
            "variants": [_plain(finding) for finding in self.findings],
            "may_be_concluded": self.may(),
            "may_not_be_concluded": self.may_not(),
            "finished": self.signal is None,
        }


def _plain(finding: Finding) -> dict[str, Any]:
    variant, difference = finding.variant, finding.difference
    return {
        "name": variant.name,
        "factor": variant.key,
        "value": variant.value,
        "is_base": variant.is_base,
        "changes": list(variant.changes),
        "parameters": finding.parameters,
        "nll": None if finding.nll is None else dataclasses.asdict(finding.nll),
        "difference": None
        if difference is None
        else {**dataclasses.asdict(difference), "interval": difference.interval()},
        "diverged": finding.n_diverged,
        "runs": [dataclasses.asdict(outcome) for outcome in finding.outcomes],
    }
