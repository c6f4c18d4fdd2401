"""What is around the arithmetic: loading, audit and compare, start-up; and how decoding grows."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import isoform as iso
from benchmarks.networks import Shape, decoder, in_transformers, prompts
from benchmarks.timing import Row, Section, in_turns
from isoform.checkpoints import load
from isoform.optimized import optimize


def loading(shape: Shape, repeats: int) -> Section:
    """From a folder to the first token."""
    import transformers

    bundle = decoder(shape)
    ids = torch.zeros(1, 4, dtype=torch.long)
    with tempfile.TemporaryDirectory() as folder:
        artifact, hf = Path(folder) / "artifact", Path(folder) / "hf"
        bundle.save(artifact)
        iso.export(bundle, hf, to="hf")
        int8 = optimize(bundle, weights="int8", max_new_tokens=1).save(Path(folder) / "int8")

        def theirs() -> None:
            with torch.inference_mode():
                transformers.AutoModelForCausalLM.from_pretrained(hf)(ids)

        def ours(path: Path) -> None:
            with torch.inference_mode():
                load(path).model(iso.Tokens(ids))

        seconds = in_turns(
            {
                "transformers": theirs,
                "isoform, the same folder": lambda: ours(hf),
                "isoform, artifact": lambda: ours(artifact),
                "isoform, int8 artifact": lambda: ours(int8),
            },
            repeats,
        )
    rows = [Row(shape.name, who, took, 1 / took, "") for who, took in seconds.items()]
    return Section(
        "Loading", "loads/s", rows, "Folder to the scores of four tokens, files in the page cache."
    )


def checking(shape: Shape, repeats: int) -> Section:
    """Audit and compare, as multiples of a forward pass over the same input."""
    bundle = decoder(shape)
    peer = in_transformers(bundle)
    ids = prompts(bundle, 2, 16)
    model = bundle.model

    def forward() -> None:
        with torch.inference_mode():
            model(iso.Tokens(ids))

    seconds = in_turns(
        {
            "a forward pass": forward,
            "audit": lambda: iso.verify.audit(model, {"tokens": iso.Tokens(ids)}),
            "compare with transformers": lambda: iso.verify.compare(
                peer, model, {"input_ids": ids}, candidate_inputs={"tokens": iso.Tokens(ids)}
            ),
        },
        repeats,
    )
    base = seconds["a forward pass"]
    rows = [
        Row(f"{shape.name}, 2 × 16 tokens", who, took, 1 / took, "", None, f"{took / base:.0f} passes")
        for who, took in seconds.items()
    ]
    return Section("Audit and compare", "runs/s", rows)


def growth(shape: Shape, lengths: list[int], repeats: int) -> Section:
    """Seconds a new token as one size grows and the others stay."""
    rows: list[Row] = []
    for length in lengths:
        bundle = decoder(shape, positions=max(lengths) + 256)
        rows.append(_token(f"context {length}", bundle, 1, length, repeats))
    for batch in (1, 2, 4, 8, 16):
        rows.append(_token(f"batch {batch}", decoder(shape), batch, 64, repeats))
    for layers in (2, 4, 8, 16):
        grown = Shape(shape.name, shape.vocab, shape.d_model, shape.heads, layers)
        rows.append(_token(f"layers {layers}", decoder(grown), 1, 64, repeats))
    for vocab in (2_000, 8_000, 32_000):
        grown = Shape(shape.name, vocab, shape.d_model, shape.heads, shape.layers)
        rows.append(_token(f"vocabulary {vocab}", decoder(grown), 1, 64, repeats))
    return Section("Growth", "steps/s", rows, f"{shape.name} but for the size named, float32 packed; a step.")


def _token(case: str, bundle: iso.Bundle, batch: int, length: int, repeats: int) -> Row:
    """The difference of two runs, so that reading the prompt is left out."""
    made = optimize(bundle, weights="float32", max_new_tokens=1)
    tokens = iso.Tokens(prompts(bundle, batch, length))
    few, many = 2, 202  # so many that what reading the prompt takes more or less is little beside them
    seconds = in_turns(
        {
            str(n): lambda n=n: iso.generate(made.model, tokens, max_new_tokens=n, compile="always")
            for n in (few, many)
        },
        repeats,
    )
    step = max(seconds[str(many)] - seconds[str(few)], 1e-9) / (many - few)
    return Row("growth", case, step, 1 / step, "", None, case)


def start_up(repeats: int) -> Section:
    """Seconds until a fresh process has done a small thing."""

    def process(*arguments: str) -> None:
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)

    seconds = in_turns(
        {
            "import torch": lambda: process("-c", "import torch"),
            "import isoform": lambda: process("-c", "import isoform"),
            "import isoform and torch": lambda: process("-c", "import torch, isoform; isoform.build"),
            "isoform --help": lambda: process("-m", "isoform", "--help"),
        },
        repeats,
    )
    return Section("Start-up", "starts/s", [Row("process", w, t, 1 / t, "") for w, t in seconds.items()])
