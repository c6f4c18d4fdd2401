"""docs/chapter.md: every requirement has code and a test, and the page tells the truth."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("generate_chapter", ROOT / "docs" / "generate_chapter.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def maps(generator):
    return generator.cited(ROOT / "src" / "isoform"), generator.cited(ROOT / "tests")


def test_nothing_is_missing(generator, maps):
    assert generator.missing(*maps) == []
    assert [n for part in generator.PARTS.values() for n in part] == list(range(1, 45))


def test_what_is_missing_is_named_and_nothing_is_written(generator, monkeypatch, tmp_path, capsys):
    for folder in ("src/isoform", "tests"):
        (tmp_path / folder).mkdir(parents=True)
    text = "".join(f"# R{n}\n" for n in range(1, 45))
    (tmp_path / "src/isoform/a.py").write_text(text.replace("# R7\n", 'x = "R7"\n'), encoding="utf-8")
    (tmp_path / "tests/test_a.py").write_text(text.replace("# R44\n", ""), encoding="utf-8")
    monkeypatch.setattr(generator, "ROOT", tmp_path)
    monkeypatch.setattr(generator, "PAGE", tmp_path / "chapter.md")
    assert generator.main() == 1
    assert capsys.readouterr().err.split("\n") == ["R7 has no code", "R44 has no test", ""]
    assert not (tmp_path / "chapter.md").exists()


def test_only_docstrings_and_comments_count(generator, tmp_path):
    path = tmp_path / "a.py"
    path.write_text(
        '"""R1, R3–R5."""\nx = "R6"  # R7\n\n\ndef f():\n    """R8."""\n    return "R9"\n', encoding="utf-8"
    )
    assert generator.cited(tmp_path) == {n: ["a.py"] for n in (1, 3, 4, 5, 7, 8)}


def test_the_committed_page_names_files_that_still_cite(maps):
    """A file cited since may be missing until `make docs`; one that no longer cites may not be there."""
    page = (ROOT / "docs" / "chapter.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| R(\d+) \|(.*)$", page, re.M)
    assert [int(n) for n, _ in rows] == list(range(1, 45))
    for number, row in rows:
        cells = row.split(" | ")[1:]
        for cell, found in zip(cells, maps, strict=True):
            named = re.findall(r"\[`([^`]+)`\]", cell)
            assert named, f"R{number}"
            assert set(named) <= set(found[int(number)]), f"R{number}: run make docs"
