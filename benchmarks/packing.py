"""What several documents a row gain over one a row (R21).

python -m benchmarks.packing --text tinyshakespeare/input.txt

Documents are the speeches of a play, of very unequal length. Three ways to batch the same tokens: one a row,
eight by chance; one a row, sorted by length; packed. Speed: ids a second of processor time, on one thread.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isoform.config import presets
from isoform.data import Characters, Packed, Task, TextData, TokenBudget, TokenizersConfig, prepare
from isoform.nn import build
from isoform.training import Learner, Work

LENGTH, ROWS, ROUNDS = 512, 4, 3


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    torch.set_num_threads(1)
    speeches = [" ".join(part.split()) for part in given.text.read_text(encoding="utf-8").split("\n\n")]
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "speeches.txt").write_text("".join(f"{s}\n" for s in speeches if s), encoding="utf-8")
        ways = {
            "eight by chance": TokenBudget(max_tokens=LENGTH * 8, pool=8),
            "sorted by length": TokenBudget(max_tokens=LENGTH * ROWS),
            "packed": Packed(length=LENGTH, batch_size=ROWS),
        }
        data = TextData(
            documents="lines", train=Path("speeches.txt"), max_length=LENGTH, over_long="truncate"
        )
        found = {way: measured(Path(name), data, batching, given.steps) for way, batching in ways.items()}
    print(json.dumps(found, indent=1))


def measured(folder: Path, data: TextData, batching: Any, steps: int) -> dict[str, float]:
    """Padding, and the median speed of some rounds."""
    prepared = prepare(Task(data, batching, folder, seed=1), TokenizersConfig(shared=Characters()))
    size = prepared.tokenizers.target.vocab_size
    config = presets.gpt2(size, d_model=128, n_heads=4, ffn_width=512, n_layers=2, max_positions=LENGTH + 1)
    learner = Learner(build(config, seed=0), smoothing=0.0, z_loss=0.0)
    works = [
        Work.of(batch, torch.device("cpu"))
        for batch, _ in zip(prepared.train.batches.epoch(0), range(steps), strict=False)
    ]
    speeds: list[float] = []
    for round_ in range(ROUNDS + 1):  # the first warms up
        start = time.process_time()
        for work in works[: 3 if round_ == 0 else None]:
            loss, _, _ = learner(work)
            (loss / work.count).backward()
            learner.zero_grad()
        if round_:
            speeds.append(sum(work.count for work in works) / (time.process_time() - start))
    report = prepared.train.batches.report(0)
    return {
        "padding": report.share,
        "batches": report.batches,
        "ids_per_second": float(np.median(speeds)),
        "spread": float(max(speeds) / min(speeds)),
    }


if __name__ == "__main__":
    main()
