"""The figures that every export ends with: printed, and stored beside what was written."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isoform.checkpoints.probe import TOLERANCE, ProbeReport
from isoform.config.files import write_text

CHECK = "isoform_check.json"


@dataclasses.dataclass(frozen=True)
class EngineCheck:
    """What another engine made of the written folder, in float32 on the CPU.

    Attributes:
        engine: its name.
        version: its version.
        scores: how many scores of ragged rows were compared.
        difference: the largest difference, relative to the largest of them.
        tokens: greedy tokens that agreed; those after a near tie or an end are not compared.
        arguments: parts of the protocol that its calls have to be given, since the folder cannot hold them.
    """

    engine: str
    version: str
    scores: int
    difference: float
    tokens: int
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    def lines(self) -> list[str]:
        """The figures in words."""
        out = [
            f"{self.engine} {self.version}: {self.scores} scores of ragged rows differ by "
            f"{self.difference:.1e} (accepted: {TOLERANCE['float32']:.0e})"
        ]
        if self.tokens:
            out.append(f"{self.engine} chooses the first {self.tokens} greedy tokens alike")
        if self.arguments:
            given = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
            out.append(f"the engine's calls need: {given}")
        return out


@dataclasses.dataclass(frozen=True)
class Checked:
    """The check of an export: the probe re-run on what was written, and another engine's answers.

    A format that only another engine opens has no ``probe``; one that has no engine of its own no ``engine``.
    """

    probe: ProbeReport | None = None
    engine: EngineCheck | None = None

    def lines(self) -> list[str]:
        """The figures in words."""
        return [line for part in (self.probe, self.engine) if part is not None for line in part.lines()]

    def write(self, folder: Path) -> None:
        """Store the figures in the folder."""
        text = json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False)
        write_text(folder / CHECK, text + "\n")

    @classmethod
    def read(cls, folder: Path) -> Checked:
        """The figures that an export stored."""
        data = json.loads((folder / CHECK).read_text(encoding="utf-8"))
        probe, engine = data["probe"], data["engine"]
        return cls(
            None if probe is None else ProbeReport.from_dict(probe),
            None if engine is None else EngineCheck(**engine),
        )
