"""One-file HTML pages."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

from isoform.report import page


class Balance(HTMLParser):
    """Collects tags left open, and text."""

    VOID = frozenset({"meta", "img", "br", "link"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag, attributes):
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def example() -> page.Page:
    made = page.Page("A & B <report>", lead="Two forms.", footer="made by hand")
    made.section("Figures", page.facts({"exact match": 0.995, "pairs": 12345}))
    made.section(
        "Checks",
        page.checks([("causality", True, "max 0"), ("cache", False, "4e-3"), ("window", None, "no window")]),
        page.paragraph("said <b>plainly</b>", note=True),
    )
    made.section(
        "Rest",
        page.table(["token", "n"], [["<s>", 3], ["語", None], ["all", 4]], total=True),
        page.code("■ ·\n■ ■"),
        page.picture(b"\x89PNG", caption='a "map"'),
    )
    return made


def test_page_is_balanced_and_escaped():
    text = example().render()
    parser = Balance()
    parser.feed(text)
    assert parser.open == []
    words = " ".join(parser.words)
    assert "A & B <report>" in words and "said <b>plainly</b>" in words and "<s>" in words
    assert "<b>plainly" not in text and "■ ·\n■ ■" in text
    assert 'alt="a &quot;map&quot;"' in text and "data:image/png;base64,iVBORw==" in text


def test_page_needs_no_network_and_no_script():
    text = example().render()
    assert not re.search(r"(?:src|href)=\"(?!data:|#)", text)
    assert "http" not in text and "<script" not in text and "@import" not in text
    assert "prefers-color-scheme: dark" in text


def test_values_read_well():
    text = example().render()
    assert "<b>0.995</b><span>exact match</span>" in text and "<b>12,345</b>" in text
    assert '<td class="number">3</td>' in text and '<td class="number">–</td>' in text
    assert '<tr class="total">' in text
    for word in ("holds", "fails", "not checked"):
        assert f">{word}</span>" in text
    assert text.count('href="#s') == 3


def test_page_is_written_whole(tmp_path: Path):
    example().write(tmp_path / "deep" / "page.html")
    assert (tmp_path / "deep" / "page.html").read_text(encoding="utf-8") == example().render()


def test_a_figure_goes_in_as_a_picture():
    from isoform.report.figures import bars

    block = page.picture(bars({"a": 1.0}, title="t", axis="x"), caption="c")
    assert "data:image/png;base64,iVBORw0KGgo" in block
