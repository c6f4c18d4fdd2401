"""Does training from ids on disk keep its memory flat, and its speed?

python -m benchmarks.streaming --gigabytes 2 --folder /tmp/streaming --text input.txt train.en-de.tsv.gz

A corpus of that size is written once (documents of one to twelve lines, drawn from the texts), tokenized
piece by piece into a store, and learnt from; beside it the same kind of batches from a corpus in memory.
Measured is the memory a process holds of its own (RssAnon): mapped pages belong to the system's cache, which
takes them back when it needs room.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isoform.config import presets
from isoform.data import (
    Packed,
    Store,
    Task,
    TextData,
    TokenBudget,
    TokenizersConfig,
    Words,
    prepare,
    read_ahead,
)
from isoform.nn import build
from isoform.training import Learner, Work

LINES = 12  # the most lines of a document
SMALL = 20_000  # lines of the corpus that is read into memory
STEPS, ROUNDS = 10, 40  # updates at a time, and how often


def own_megabytes() -> float:
    """What this process holds itself."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise OSError("no RssAnon in /proc/self/status")


class Watch:
    """The most that this process holds itself, looked at ten times a second."""

    def __init__(self) -> None:
        self._most = own_megabytes()
        self._over = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while not self._over.wait(0.1):
            self._most = max(self._most, own_megabytes())

    def most(self) -> float:
        """The most so far; from here on it is looked for anew."""
        found, self._most = max(self._most, own_megabytes()), 0.0
        return found


def lines_of(path: Path) -> list[str]:
    """The lines of a text that are not blank, plain or gzipped."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    return [line for line in text.splitlines() if line.strip()]


def write_corpus(path: Path, size: int, lines: list[str]) -> None:
    """Documents, one a line, at least so many bytes together."""
    generator = np.random.default_rng(0)
    written = 0
    with path.open("wb") as file:
        while written < size:
            counts = generator.integers(1, LINES + 1, size=2000)
            drawn = iter(generator.integers(len(lines), size=int(counts.sum())).tolist())
            block = "\n".join(" ".join(lines[next(drawn)] for _ in range(count)) for count in counts)
            written += file.write(f"{block}\n".encode())


def prepared(folder: Path, name: str, store: Store | None, packed: bool) -> Any:
    """The corpus' batches."""
    batching: Any = Packed(length=256, batch_size=4) if packed else TokenBudget(max_tokens=1000, pool=4096)
    data = TextData(documents="lines", train=Path(name), store=store)
    tokenizers = TokenizersConfig(shared=Words(vocab_size=4_000))
    return prepare(Task(data, batching, folder, seed=1), tokenizers)


class Trainer:
    """Updates on the batches of an epoch."""

    def __init__(self, found: Any) -> None:
        size = found.tokenizers.target.vocab_size
        config = presets.gpt2(size, d_model=64, n_heads=4, ffn_width=256, n_layers=2)
        self._learner = Learner(build(config, seed=0), smoothing=0.0, z_loss=0.0)
        self._optimizer = torch.optim.AdamW(self._learner.parameters(), lr=1e-3)
        self._work = read_ahead(map(Work.of, found.train.batches.epoch(0)))

    def steps(self, count: int) -> tuple[float, float]:
        """Ids a second, and the share of the time in which batches were waited for."""
        start, ids, waited = time.perf_counter(), 0, 0.0
        for _ in range(count):
            before = time.perf_counter()
            work = next(self._work)
            waited += time.perf_counter() - before
            loss, _, _ = self._learner(work)
            (loss / work.count).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            ids += work.count
        seconds = time.perf_counter() - start
        return ids / seconds, waited / seconds


def passed(found: Any) -> float:
    """Make every batch of an epoch; ids a second."""
    start, ids = time.perf_counter(), 0
    for batch in found.train.batches.epoch(0):
        ids += int(batch.supervised.sum())
    return ids / (time.perf_counter() - start)


def main() -> None:
    """Write, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--packed", action="store_true")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    large, small = given.folder / "large.txt", given.folder / "small.txt"
    if not large.exists():
        lines = [line for path in given.text for line in lines_of(path)]
        write_corpus(given.folder / "begun.txt", int(given.gigabytes * 1e9), lines)
        (given.folder / "begun.txt").rename(large)
    with large.open(encoding="utf-8") as lines:
        small.write_text("".join(itertools.islice(lines, SMALL)), encoding="utf-8")

    memory = prepared(given.folder, "small.txt", None, given.packed)
    watch = Watch()
    held = {"before": watch.most()}
    start = time.perf_counter()
    store = Store(folder=Path("large.ids"), workers=given.workers, sample=2_000)
    disk = prepared(given.folder, "large.txt", store, given.packed)
    opening = time.perf_counter() - start
    held |= {"most_while_opening_or_writing": watch.most(), "after_it": own_megabytes()}
    # The two take turns, so that what else the machine does meets both; the first round is not counted.
    trainers = {"memory": Trainer(memory), "disk": Trainer(disk)}
    turns = [{name: each.steps(STEPS) for name, each in trainers.items()} for _ in range(ROUNDS + 1)]
    rounds = turns[1:]
    held["most_while_training"] = watch.most()
    passing = passed(disk)
    held["most_in_a_pass"] = watch.most()
    state = disk.train.stored.state
    answer = {
        "bytes": large.stat().st_size,
        "ids": state.tokens["tokens"],
        "rows": state.rows,
        "seconds_to_open_or_write": opening,
        "megabytes": held,
        "ids_per_second_of_batches_alone": passing,
        **{
            name: {
                "ids_per_second": statistics.median(found[name][0] for found in rounds),
                "waiting": statistics.median(found[name][1] for found in rounds),
            }
            for name in trainers
        },
        "disk_over_memory": statistics.median(found["disk"][0] / found["memory"][0] for found in rounds),
    }
    print(json.dumps(answer, indent=1))


if __name__ == "__main__":
    main()
