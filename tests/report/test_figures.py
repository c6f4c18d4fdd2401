"""Figures: any script, no window, nothing half-written; a reading pattern is labelled as one (R36)."""

from __future__ import annotations

from pathlib import Path

import pytest

from isoform.errors import DataError
from isoform.report import figures

QUERIES = ["שלום", "日本", "$x_1$", " "]
WEIGHTS = [[0.25, 0.75], [1.0, 0.0], [0.5, 0.5], [0.1, 0.9]]


def texts(figure) -> str:
    axes = figure.axes[0]
    labels = [*axes.get_xticklabels(), *axes.get_yticklabels(), figure._supxlabel]
    return "|".join(label.get_text() for label in labels if label is not None)


def attention():
    return figures.attention_map(WEIGHTS, queries=QUERIES, keys=["a", "ب"], which="layer 0, head 1")


def test_attention_map_says_what_it_is_not():
    figure = attention()
    assert "a reading pattern, not an explanation" in texts(figure)
    assert "␣" in texts(figure)
    assert "layer 0, head 1" in figure.axes[0].get_title(loc="left")
    image = figure.axes[0].images[0]
    assert image.get_clim() == (0.0, 1.0)
    assert image.get_array().tolist() == WEIGHTS


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_labels_of_any_script_draw_without_a_warning(tmp_path: Path, suffix: str):
    figures.save(attention(), tmp_path / f"map{suffix}")
    assert [path.name for path in tmp_path.iterdir()] == [f"map{suffix}"]
    assert (tmp_path / f"map{suffix}").stat().st_size > 1000


def test_a_character_without_a_glyph_is_written_as_its_code():
    write = figures.lettering(["a\U000f1234"])
    assert write.families[0] == "DejaVu Sans"
    assert write("a\U000f1234$") == r"a\uf1234\$"
    assert figures.lettering(["abc"]) == figures.Lettering(("DejaVu Sans",), frozenset())


def test_a_suffix_that_is_none(tmp_path: Path):
    with pytest.raises(DataError, match=r"cannot draw '\.bmp'; expected \.png, \.svg, \.pdf"):
        figures.save(attention(), tmp_path / "map.bmp")
    assert not list(tmp_path.iterdir())


def test_the_same_drawing_gives_the_same_bytes():
    assert figures.render(attention(), "svg") == figures.render(attention(), "svg")


def test_global_settings_are_left_alone():
    import matplotlib

    before = dict(matplotlib.rcParams)
    attention()
    assert dict(matplotlib.rcParams) == before


def test_curves_bars_and_numbers():
    lines = figures.curves(
        {"train": ([1, 2], [3.0, 2.0]), "validation": ([2], [2.5])},
        title="Loss", x_axis="step", y_axis="nats", logarithmic=True,
    )  # fmt: skip
    axes = lines.axes[0]
    assert axes.get_yscale() == "log"
    assert [line.get_label() for line in axes.lines] == ["train", "validation"]
    assert axes.lines[1].get_marker() == "o"  # a single point is seen
    drawn = figures.bars({"de → fr": 0.5, "ja → iso": 1.0}, title="Exact match", axis="share")
    assert [bar.get_width() for bar in drawn.axes[0].patches] == [0.5, 1.0]
    assert drawn.axes[0].yaxis_inverted()
    table = figures.heat_map([[0.0, 1.0]], rows=["a"], columns=["b", "c"], title="t", numbers="percent").axes[
        0
    ]
    assert [text.get_text() for text in table.texts] == ["0", "100"]
