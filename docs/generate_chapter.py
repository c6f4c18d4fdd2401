"""Write ``docs/chapter.md``: where each requirement of the chapter is met, and which tests hold it.

python docs/generate_chapter.py

Code and tests cite a requirement by its number (``R12``, ``R21–R24``) in docstrings and comments. Exits 1,
and writes nothing, when one has no code or no test.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "chapter.md"

PARTS: dict[str, dict[int, str]] = {
    "Interfaces and assumptions (6.1)": {
        1: "sublayers keep [B, T, d]; a shape that does not fit is an error that names both",
        2: "attention has a query side and a key/value side; packed projections stay independent (6.1–6.2)",
        3: "d = h · d_h, and where another head width is allowed",
        4: "a query that sees nothing gives zeros, never NaN, in values and gradients",
        5: "masks and fixed positions are not trained; eps > 0 but for the worked example",
    },
    "Feed-forward networks and activations (6.2)": {
        6: "two-layer network, activations, free width, biases (6.3)",
        7: "without an activation the maps collapse (6.4); sum over units (6.5)",
        8: "ReLU at 0; exact and tanh GELU have different names (6.6–6.8)",
        9: "gated networks; gate and content are separate parameters (6.9–6.10)",
        10: "equal-budget width g = 2f/3 and its rounding",
    },
    "Residual stream and normalisation (6.3–6.5)": {
        11: "residual update with a scale (6.11–6.12)",
        12: "LayerNorm (6.13–6.14)",
        13: "RMSNorm; (1 + gain) is its own option (6.18)",
        14: "Jacobians and gradients by hand (6.15–6.17, 6.19)",
        15: "Post-LN and Pre-LN; placement, kind, activation, gating are independent (6.20–6.23)",
        16: "presets `original` and `pre_ln`",
        17: "one setting changed at a time",
    },
    "Structures and visibility (6.6)": {
        18: "four structures; modules and visibility are two dimensions",
        19: "encoder and decoder layers, Post-LN and Pre-LN (6.24–6.31)",
        20: "layers have their own parameters; one memory, encoded once",
        21: "visibility matrices (6.32), prefix (6.33), cross; padding, documents, windows, streaming",
        22: "truth direction is a type; every conversion both ways; no hint is trusted",
        23: "labels that a prefix shows are refused (exercise 6.7)",
        24: "causality at every layer, and of the shift",
    },
    "Shapes, parameters, cost (6.7)": {
        25: "the table of shapes",
        26: "parameters in closed form, equal to the count (6.34–6.35)",
        27: "shared tables: the same tokens, the sum of gradients (6.36)",
        28: "FLOPs and memory, formula against measurement",
        29: "the worked example (6.37–6.50)",
    },
    "Training and generation (6.8)": {
        30: "Algorithm 6.1: one shift, loss over supervised positions ÷ their number",
        31: "Algorithm 6.2: forward, choice and stopping are three parts",
        32: "cached and uncached generation agree",
        33: "four dropouts, inverted scaling, off in eval",
        34: "label smoothing; its loss and the NLL are two things",
        35: "validation chooses, test is read once; metrics state their signature",
        36: "attention weights are shown as a reading pattern",
    },
    "Equivalence and artifacts (6.8.4, exercises 6.10–6.11)": {
        37: "what an artifact holds, and what it refuses to load",
        38: "reload check",
        39: "migration order",
        40: "agreement with torch.nn and Hugging Face, forward and backward",
        41: "checks of any model: causality, padding, norms",
    },
    "What the chapter presumes": {
        42: "multi-head, multi-query, grouped-query; query/key norm; soft cap",
        43: "position kinds",
        44: "tokenizers and special ids",
    },
}

HEAD = """# Requirement → code → test

<!-- Made by docs/generate_chapter.py from the R-numbers that docstrings and comments cite. Do not edit. -->

Every requirement of the chapter, where the code meets it, and which tests hold it: those in `tests/chapter`
by the chapter's own formulas, those in `tests/parity` and `tests/checkpoints` against other libraries. Paths
are below `src/isoform` and `tests`. Equations are cited beside the numbers in the docstrings.
"""


def numbers(text: str) -> set[int]:
    """The requirements that a text cites; R21–R24 is four of them."""
    found = {int(n) for n in re.findall(r"\bR(\d{1,2})\b", text)}
    for a, b in re.findall(r"\bR(\d{1,2})[–-]R?(\d{1,2})\b", text):
        found |= set(range(int(a), int(b) + 1))
    return found


def remarks(path: Path) -> Iterator[str]:
    """Comments and docstrings of a file, and nothing that a program works with."""
    before, starts = tokenize.NEWLINE, (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    text = path.read_text(encoding="utf-8")
    if not numbers(text):  # most files cite none, and reading tokens takes its time
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and before in starts):
            yield token.string
        if token.type not in (tokenize.NL, tokenize.COMMENT):
            before = token.type


def cited(folder: Path) -> dict[int, list[str]]:
    """For each requirement the files below a folder that cite it, in order."""
    found: dict[int, list[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        for number in sorted(set().union(*map(numbers, remarks(path)))):
            found.setdefault(number, []).append(path.relative_to(folder).as_posix())
    return found


def missing(code: dict[int, list[str]], tests: dict[int, list[str]]) -> list[str]:
    """What nobody meets or holds, one line each."""
    wanted = [n for part in PARTS.values() for n in part]
    return [f"R{n} has no code" for n in wanted if n not in code] + [
        f"R{n} has no test" for n in wanted if n not in tests
    ]


def render(code: dict[int, list[str]], tests: dict[int, list[str]]) -> str:
    """The page."""

    def listed(paths: list[str], below: str) -> str:
        return ", ".join(f"[`{path}`](../{below}/{path})" for path in paths)

    lines = [HEAD]
    for title, part in PARTS.items():
        lines += [f"## {title}", "", "| | requirement | code | tests |", "|---|---|---|---|"]
        lines += [
            f"| R{n} | {words} | {listed(code[n], 'src/isoform')} | {listed(tests[n], 'tests')} |"
            for n, words in part.items()
        ]
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    """Write the page, or say what is missing."""
    code, tests = cited(ROOT / "src" / "isoform"), cited(ROOT / "tests")
    if faults := missing(code, tests):
        print("\n".join(faults), file=sys.stderr)
        return 1
    PAGE.write_text(render(code, tests), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
