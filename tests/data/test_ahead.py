"""Values made ahead are the same ones in the same order, and no thread outlives who asks for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from isoform.data.ahead import AHEAD, read_ahead
from isoform.errors import DataError


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


class Counted:
    """Numbers; how many have been begun, and by which thread."""

    def __init__(self, fault: int | None = None) -> None:
        self.begun, self.fault, self.reached = 0, fault, threading.Event()
        self.threads: set[str] = set()

    def __iter__(self) -> Iterator[int]:
        for number in range(8):
            self.begun += 1
            self.threads.add(threading.current_thread().name)
            if self.begun == AHEAD:
                self.reached.set()
            if number == self.fault:
                raise DataError(f"number {number}")
            yield number


def test_the_same_values_made_by_a_thread() -> None:
    source = Counted()
    assert list(read_ahead(source)) == list(range(8))
    assert source.threads == {"read ahead"}
    assert list(read_ahead([])) == []


def test_no_more_than_a_few_are_held() -> None:
    source = Counted()
    with closing(read_ahead(source)) as found:
        assert next(found) == 0
        assert source.reached.wait(10) and source.begun <= 1 + AHEAD
    assert source.begun <= 1 + AHEAD


def test_an_error_comes_where_its_value_would_have() -> None:
    found = read_ahead(Counted(fault=3))
    assert [next(found) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DataError, match="number 3"):
        next(found)


def test_whoever_fails_while_values_are_made_leaves_no_thread() -> None:
    with pytest.raises(KeyError), closing(read_ahead(Counted())) as found:
        next(found)
        raise KeyError
