"""Tables, matrices and grids as text."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from isoform.report import terminal


def printed(renderable) -> list[str]:
    console = Console(file=io.StringIO(), width=100)
    console.print(renderable)
    return [line.rstrip() for line in console.file.getvalue().rstrip("\n").split("\n")]


def test_matrix_aligns_and_says_zero_once():
    assert printed(terminal.matrix([[1.0, -1.41421356], [-0.0, 12.5]])) == [
        "⎡ 1  -1.414214 ⎤",
        "⎣ 0       12.5 ⎦",
    ]
    assert printed(terminal.matrix([[1.0], [2.0], [3.0]])) == ["⎡ 1 ⎤", "⎢ 2 ⎥", "⎣ 3 ⎦"]
    assert printed(terminal.matrix([[0.5, 2.0]])) == ["[ 0.5  2 ]"]
    assert printed(terminal.matrix([[-1e-9]])) == ["[ 0 ]"]


def test_grid_is_queries_by_keys():
    assert printed(terminal.grid([[True, False, False], [True, True, False]])) == [
        "  0 1 2",
        "0 ■ · ·",
        "1 ■ ■ ·",
    ]


def test_grid_keeps_its_columns_under_wide_characters():
    lines = terminal.grid([[True, False], [False, True]], queries=["日本", "a"], keys=["語", "bcd"]).plain
    first, second, third = lines.split("\n")
    assert cell_len(first) == cell_len(second) == cell_len(third) == 4 + 1 + 3 + 1 + 3


def test_table_numbers_flush_right_and_a_sum_below_a_rule():
    lines = printed(
        terminal.table(["part", "count"], [["a", 1234567], ["b", None], ["all", 1]], total=True, title="T")
    )
    assert lines[0] == "T"
    assert lines[1].split() == ["part", "count"]
    assert lines[3].endswith("1,234,567") and lines[4].endswith("        –")
    assert set(lines[5]) <= {"─", " "} and lines[6].startswith("all")


def test_markup_in_a_cell_is_text():
    assert "[bold]x" in printed(terminal.table(["token"], [["[bold]x"]]))[-1]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (1234, "1,234"), (0.123456, "0.1235"), (True, "True"), ("x", "x"), (1e-9, "1e-09")],
)
def test_number(value, text: str):
    assert terminal.number(value) == text


def test_verdicts():
    assert [terminal.verdict(v).plain for v in (True, False, None)] == ["holds", "fails", "not checked"]


def test_visible_tokens_stay_on_one_line():
    assert terminal.visible(" a\n\u200b日") == r"␣a\n\u200b日"
