"""``python -m benchmarks [--quick] [--only SECTION]…``: measure, and write results.md and results.png.

What is not measured stays as ``results.json`` has it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import environment


def main() -> int:
    """Run the sections asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small networks, a few minutes")
    parser.add_argument("--only", action="append", metavar="SECTION", help="by name; repeatable")
    parser.add_argument(
        "--prompt", action="append", type=int, metavar="TOKENS", help="decode after these alone; repeatable"
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="folder to write to")
    asked = parser.parse_args()
    environment.enter()
    return run(asked.quick, asked.only, asked.prompt, asked.output)


def run(quick: bool, only: list[str] | None, prompts: list[int] | None, folder: Path) -> int:
    """Measure and write; the exit status."""
    import warnings

    warnings.simplefilter("ignore")
    from benchmarks import around, decoding, learning, loading, networks, page
    from benchmarks.timing import Section

    peaks = learning.peaks()
    small, six, odd = networks.GPT2_SMALL, networks.SIX, networks.ODD
    wide, narrow = networks.TRANSLATION, networks.SMALL_TRANSLATION
    repeats = 3 if quick else 5
    full = not quick
    sections: dict[str, Callable[[], Section]] = {
        "decode": lambda: decoding.decode(
            [small, six, odd] if full else [six],
            [1, 8, 32] if full else [1, 8],
            prompts or ([32, 512] if full else [32]),
            128 if full else 32,
            repeats,
        ),
        "translation": lambda: decoding.translate(
            wide if full else narrow,
            [1, 16, 64] if full else [1, 16],
            [1, 4],
            48 if full else 16,
            repeats,
        ),
        "training": lambda: learning.steps(
            (wide, networks.Shape("decoder 6×384", 8_000, 384, 6, 6)) if full else (narrow, six),
            16 if full else 8,
            32,
            repeats,
            peaks,
        ),
        "buckets": lambda: learning.buckets(
            six if full else networks.Shape("decoder 4×128", 4_000, 128, 4, 4), 2048, 3 if full else 1
        ),
        "loading": lambda: around.loading(small if full else six, repeats),
        "memory": lambda: loading.memory(17 if full else 4, 3 if full else 1),
        "checking": lambda: around.checking(six, 3),
        "growth": lambda: around.growth(
            networks.Shape("decoder 4×128", 4_000, 128, 4, 4),
            [128, 512, 2048, 8192] if full else [128, 512, 2048],
            repeats,
        ),
        "start-up": lambda: around.start_up(repeats),
    }
    if unknown := [name for name in only or [] if name not in sections]:
        print(f"--only {unknown[0]}: expected one of {', '.join(sections)}", file=sys.stderr)
        return 2
    on = (
        f"{environment.line()}. Measured peaks of products: {peaks['float32'] / 1e9:.0f} GFLOP/s in float32, "
        f"{peaks['bfloat16'] / 1e9:.0f} in bfloat16."
    )
    command = " ".join(
        [
            "python -m benchmarks",
            *(["--quick"] if quick else []),
            *(f"--only {n}" for n in only or []),
            *(f"--prompt {n}" for n in prompts or []),
        ]
    )
    found: list[Section] = []
    for name in only or sections:
        print(f"{name} …", file=sys.stderr, flush=True)
        found.append(sections[name]())
        page.write(folder, command, on, found)  # so far: the whole takes long
    print(f"wrote {folder / 'results.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
