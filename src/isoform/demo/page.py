"""The demo's result as a page that opens without a network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from isoform.report import figures, page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from isoform.demo.job import DemoResult


def write_page(result: DemoResult, path: Path) -> None:
    """Write the page whole or not at all."""
    from isoform.config.words import describe

    seconds = result.seconds
    made = page.Page(
        "Dates in 24 languages",
        lead="An encoder–decoder learns to translate dates written out in any of 24 languages and 13 scripts "
        "into any other and into ISO 8601. No calendar date of the test was seen in training.",
        footer="Made by `isoform demo`; the same command makes it again.",
    )
    made.section(
        "In short",
        page.facts(
            {
                "exact match on unseen dates": f"{result.scores['exact_match'].value:.4f}",
                "seconds of training": f"{seconds['train']:.0f}",
                "parameters": f"{result.counted:,}",
                "checks that hold": f"{sum(c.passed is True for c in result.checks)} of {len(result.checks)}",
            }
        ),
        page.table(["asked", "answered"], [list(pair) for pair in result.translations]),
    )
    made.section(
        "Evaluation",
        page.table(
            ["metric", "value", "signature"],
            [[name, score.value, score.signature] for name, score in result.scores.items()],
        ),
        page.picture(pair_map(result), caption="Exact match by source and target language, in per cent"),
    )
    made.section(
        "Training",
        page.picture((result.training.folder / "loss.png").read_bytes(), caption="Loss and validation NLL"),
        page.table(["step", "seconds"], [[name, round(value, 1)] for name, value in seconds.items()]),
    )
    made.section("Architecture", *(page.paragraph(line) for line in describe(result.bundle.config)))
    made.section(
        "Parameters",
        page.table(
            ["component", "closed form of one", "how often", "parameters"],
            [*components(result), ["all", "counted in the real module", None, result.counted]],
            total=True,
        ),
    )
    made.section("Checks", page.checks((c.name, c.passed, c.statement) for c in result.checks))
    made.section(
        "One translation, looked into",
        page.picture(
            cross_map(result), caption=f"Cross-attention while writing {result.translations[1][1]!r}"
        ),
        page.paragraph(figures.READING_PATTERN, note=True),
    )
    made.write(path)


def components(result: DemoResult) -> list[list[object]]:
    """Name, formula, repetition and parameters of each component, down to sublayers."""
    found = [
        (path, part) for path, part in result.parameters.root.walk() if path.count(".") < 3 and part.total
    ]
    return [[path, None if p.formula is None else str(p.formula), p.repeat, p.total] for path, p in found]


def pair_map(result: DemoResult) -> Figure:
    """Exact match of every direction."""
    sources = sorted({a for a, _ in result.by_pair})
    targets = sorted({b for _, b in result.by_pair})
    nothing = float("nan")
    return figures.heat_map(
        [[result.by_pair.get((a, b), nothing) for b in targets] for a in sources],
        rows=sources,
        columns=targets,
        title="Exact match by language pair",
        row_axis="source",
        column_axis="target",
        low=0.0,
        high=1.0,
    )


def cross_map(result: DemoResult) -> Figure:
    """The head of the last layer that reads most sharply."""
    assert result.bundle.tokenizer is not None and result.bundle.source_tokenizer is not None
    looked = result.trace
    layer = max(number for side, number in looked.weights if side == "cross")
    weights = looked.weights["cross", layer]
    head = int(weights.amax(-1).mean(-1).argmax())
    assert looked.source_ids is not None
    return figures.attention_map(
        weights[head].tolist(),
        queries=[result.bundle.tokenizer.shown(i) for i in looked.ids],
        keys=[result.bundle.source_tokenizer.shown(i) for i in looked.source_ids],
        which=f"cross-attention, layer {layer}, head {head}",
    )
