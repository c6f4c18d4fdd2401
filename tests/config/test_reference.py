"""docs/configuration.md says what the classes say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def generator():
    spec = importlib.util.spec_from_file_location("generate_reference", DOCS / "generate_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_page_is_current():
    text = (DOCS / "configuration.md").read_text(encoding="utf-8")
    assert text == generator().render(), "run: python docs/generate_reference.py"


def test_every_field_has_a_meaning():
    rows = [line.split(" | ") for line in generator().render().splitlines() if line.startswith("| `")]
    fields = [row for row in rows if len(row) == 4]
    assert len(fields) > 120
    assert all(row[3].strip(" |") for row in fields)
