"""Does training from ids on disk keep its memory flat, and its speed?

python -m benchmarks.streaming --gigabytes 2 --folder /tmp/streaming

A corpus of that size is written once (lines of random words), tokenized piece by piece into a store, and
learnt from; beside it the same kind of batches from a corpus in memory. Memory is what a process holds of its
own (RssAnon): mapped pages belong to the system's cache, which takes them back when it needs room.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isoform.config import presets
from isoform.data import Packed, Store, Task, TextData, TokenBudget, TokenizersConfig, Words, prepare
from isoform.nn import build
from isoform.training import Learner, Work

WORDS, LINE = 4_000, 60  # distinct words, words a line
SMALL = 20_000  # lines of the corpus that is read into memory
STEPS, WARM = 60, 10


def own_megabytes() -> float:
    """What this process holds itself."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise OSError("no RssAnon in /proc/self/status")


def write_corpus(path: Path, size: int) -> None:
    """Lines of random words, at least so many bytes."""
    generator = np.random.default_rng(0)
    known = np.array([f"w{number:x}" for number in range(WORDS)])
    written = 0
    with path.open("w") as file:
        while written < size:
            block = "\n".join(" ".join(row) for row in known[generator.integers(WORDS, size=(2000, LINE))])
            written += file.write(block + "\n")


def prepared(folder: Path, name: str, store: Store | None, packed: bool) -> Any:
    """The corpus' batches."""
    batching: Any = Packed(length=256, batch_size=4) if packed else TokenBudget(max_tokens=1000, pool=4096)
    data = TextData(documents="lines", train=Path(name), store=store)
    tokenizers = TokenizersConfig(shared=Words(max_texts=2_000))
    return prepare(Task(data, batching, folder, seed=1), tokenizers)


def speed(found: Any, watch: Callable[[], None]) -> dict[str, float]:
    """Updates on the first batches: ids a second, and the share of time in which batches were waited for."""
    config = presets.gpt2(
        found.tokenizers.target.vocab_size, d_model=64, n_heads=4, ffn_width=256, n_layers=2
    )
    learner = Learner(build(config, seed=0), smoothing=0.0, z_loss=0.0)
    optimizer = torch.optim.AdamW(learner.parameters(), lr=1e-3)
    batches = found.train.batches.epoch(0)
    tokens = waited = 0.0
    for step in range(STEPS + WARM):
        if step == WARM:
            start, tokens, waited = time.perf_counter(), 0, 0.0
        before = time.perf_counter()
        work = Work.of(next(batches), torch.device("cpu"))
        waited += time.perf_counter() - before
        loss, _, _ = learner(work)
        (loss / work.count).backward()
        optimizer.step()
        optimizer.zero_grad()
        tokens += work.count
        watch()
    seconds = time.perf_counter() - start
    return {"ids_per_second": tokens / seconds, "waiting": waited / seconds}


def passed(found: Any, watch: Callable[[], None]) -> float:
    """Make every batch of an epoch; ids a second."""
    start, ids = time.perf_counter(), 0
    for number, batch in enumerate(found.train.batches.epoch(0)):
        ids += int(batch.supervised.sum())
        if number % 100 == 0:
            watch()
    return ids / (time.perf_counter() - start)


def main() -> None:
    """Write, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--packed", action="store_true")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    large, small = given.folder / "large.txt", given.folder / "small.txt"
    if not large.exists():
        write_corpus(large, int(given.gigabytes * 1e9))
    with large.open() as lines:
        small.write_text("".join(line for line, _ in zip(lines, range(SMALL), strict=False)))
    held: list[float] = []

    def watch() -> None:
        held.append(own_megabytes())

    # The two take turns, so that what else the machine does meets both.
    memory = prepared(given.folder, "small.txt", None, given.packed)
    watch()
    before = held[-1]
    start = time.perf_counter()
    store = Store(folder=Path("large.ids"), workers=given.workers, sample=2_000)
    disk = prepared(given.folder, "large.txt", store, given.packed)
    writing = time.perf_counter() - start
    watch()
    after_writing = held[-1]
    rounds = [(speed(memory, watch), speed(disk, watch)) for _ in range(5)]
    state = disk.train.stored.state
    held.clear()
    passing = passed(disk, watch)
    median = {
        name: {key: float(np.median([pair[side][key] for pair in rounds])) for key in rounds[0][side]}
        for side, name in enumerate(("memory", "disk"))
    }
    print(
        json.dumps(
            {
                "bytes": large.stat().st_size,
                "ids": state["tokens"]["tokens"],
                "rows": state["rows"],
                "seconds_to_open_or_write": writing,
                "megabytes_before": before,
                "megabytes_after_opening": after_writing,
                "megabytes_in_a_pass": [min(held), max(held)],
                "ids_per_second_of_batches_alone": passing,
                **median,
                "disk_over_memory": float(
                    np.median([d["ids_per_second"] / m["ids_per_second"] for m, d in rounds])
                ),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
