"""Write ``docs/chapter.md``: where each requirement of the chapter is met, and which tests cite it.

python docs/generate_chapter.py
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEAD = """# Requirement → code → test

Made by `python docs/generate_chapter.py` from the R-numbers that docstrings, comments and tests cite.
Equation numbers (6.1–6.51) are cited beside them in the docstrings.

| | code | tests |
|---|---|---|
"""


def cited(folder: str) -> dict[int, list[str]]:
    """For each R-number the files below a folder that cite it; ranges like R21–R24 count for each."""
    found: dict[int, list[str]] = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        numbers = {int(n) for n in re.findall(r"\bR(\d{1,2})\b", text)}
        for a, b in re.findall(r"\bR(\d{1,2})[–-]R?(\d{1,2})\b", text):
            numbers |= set(range(int(a), int(b) + 1))
        for number in numbers:
            found.setdefault(number, []).append(str(path.relative_to(ROOT / folder)))
    return found


def main() -> None:
    """Write the page."""
    code, tests = cited("src/isoform"), cited("tests")

    def listed(paths: list[str]) -> str:
        return ", ".join(f"`{path}`" for path in paths)

    rows = [f"| R{n} | {listed(code.get(n, []))} | {listed(tests.get(n, []))} |" for n in range(1, 45)]
    (ROOT / "docs" / "chapter.md").write_text(HEAD + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
