"""Run every block of Python in ``docs/visibility.md`` and put what it prints in the block behind it.

python docs/generate_visibility.py
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).parent / "visibility.md"
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```\n.*?\n```)?", re.S)


def run(code: str, names: dict[str, object]) -> str:
    """Execute a block, the names of those before it known, and give what it prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, PAGE.name, "exec"), names)
    return out.getvalue().rstrip()


def render(text: str) -> str:
    """The page with the output that its code has now."""
    names: dict[str, object] = {"__name__": "visibility"}

    def shown(block: re.Match[str]) -> str:
        printed = run(block[1], names)
        return f"```python\n{block[1]}```" + (f"\n\n```\n{printed}\n```" if printed else "")

    return BLOCK.sub(shown, text)


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
