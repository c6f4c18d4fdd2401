"""The two README pages: the same blocks of code, which run and print what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
RUNNING = 2  # the first blocks of Python; the others need a checkpoint or a module of the reader's


def blocks(page: str) -> list[tuple[str, str]]:
    return BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_code_runs_and_prints_what_is_shown(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    found, names = blocks(page), {}
    places = [i for i, (language, _) in enumerate(found) if language == "python"][:RUNNING]
    for place in places:
        exec(found[place][1], names)
        language, shown = found[place + 1]
        assert language == "" and shown in capsys.readouterr().out


def test_both_pages_have_the_same_code_and_links() -> None:
    def code(page: str) -> list[list[str]]:
        return [
            [line.partition("#")[0].rstrip() for line in text.splitlines()]
            for language, text in blocks(page)
            if language == "python"
        ]

    def links(page: str) -> set[str]:
        return set(re.findall(r"\]\(([^)]+\.md)\)", (ROOT / page).read_text(encoding="utf-8")))

    assert code("README.md") == code("README.zh.md")
    assert links("README.md") - {"README.zh.md"} == links("README.zh.md") - {"README.md"}
    assert all((ROOT / link).is_file() for link in links("README.md"))
