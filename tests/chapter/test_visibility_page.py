"""docs/visibility.md shows what its code prints (R21, R22)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_committed_page_is_what_its_blocks_print():
    spec = importlib.util.spec_from_file_location("generate_visibility", DOCS / "generate_visibility.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = (DOCS / "visibility.md").read_text(encoding="utf-8")
    assert module.render(text) == text, "run: make docs"
    assert text.count("```python") > 12
    assert module.render(text.replace("■", "x")) != text.replace("■", "x")
