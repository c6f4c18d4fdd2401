"""The worked example on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from isoform.report.terminal import grid, heading, indented, matrix

DECIMALS = 6
SAME = 1e-9
"""Two losses nearer than this are called the same; the run is in float64."""


def show(
    console: Console,
    example: Mapping[str, Any],
    *,
    against: str,
    residual1: Sequence[float],
    loss: float,
) -> None:
    """Print the chain.

    Args:
        console: where.
        example: ``settings``, ``inputs``, ``allowed`` and ``steps``, as `WorkedExample.to_dict` gives them.
        against: the visibility it is held against.
        residual1: largest difference from that run at each position behind the attention.
        loss: difference of the losses.
    """
    settings = example["settings"]
    norm = {"layer": "LayerNorm", "rms": "RMSNorm"}[settings["norm"]]
    prefix = "" if settings["prefix"] is None else f" of {settings['prefix']}"
    console.print(Text("The worked example (6.37–6.50)", style="bold"))
    console.print(
        f"two positions, one head, d = 2, f = 3 · {settings['placement'].title()}-LN with {norm}, "
        f"ε = {settings['eps']:g} · {settings['visibility']}{prefix} · float64"
    )
    console.print(heading("Weights", "biases 0, gains 1; y = x W; W_Q, W_K, W_V and W_O are the identity"))
    inputs = example["inputs"]
    weights = Table.grid(padding=(0, 3))
    names = {"X": "X (6.37)", "W_1": "W₁ (6.38)", "W_2": "W₂ (6.38)", "W_out": "W_out (6.39)"}
    weights.add_row(*names.values())
    weights.add_row(*(matrix(inputs[name]) for name in names))
    console.print(indented(weights))
    console.print(heading("Who may read whom", "queries downwards, keys across"))
    console.print(indented(grid(example["allowed"], queries=["1", "2"], keys=["1", "2"])))
    console.print(heading("Step by step"))
    steps = Table.grid(padding=(0, 3))
    for step in example["steps"]:
        value: RenderableType = (
            matrix(step["value"], digits=DECIMALS)
            if isinstance(step["value"], list)
            else Text(f"{step['value']:.{DECIMALS}f}", style="bold")
        )
        name = Text.assemble((step["name"], "cyan"), "\n", (step["formula"], "dim"))
        steps.add_row(Text(f"({step['equation']})", style="dim"), name, value)
        steps.add_row()
    console.print(indented(steps))
    targets, vocabulary = ", ".join(inputs["targets"]), ", ".join(inputs["vocabulary"])
    console.print(f"The loss is the mean over the two positions; targets {targets} of {vocabulary}.")
    console.print(_lesson(against, residual1, loss))


def _lesson(against: str, residual1: Sequence[float], loss: float) -> Text:
    places = [f"{d:.6f} at position {i}" for i, d in enumerate(residual1, 1) if d > SAME]
    if not places:
        return Text(f"Held against the {against} run: every position reads the same, nothing differs.")
    inside = f"Held against the {against} run, residual1 differs by {' and '.join(places)}"
    if loss <= SAME:
        end = (
            ", and yet the loss is the same: a test for leaks that looks at outputs only would miss this one"
        )
    else:
        end = f", the loss by {loss:.3g}. Pre-LN with LayerNorm and ε = 0 would hide it from the loss"
    return Text(f"{inside}{end} (exercise 6.9).", style="yellow")
