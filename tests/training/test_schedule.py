from __future__ import annotations

import math

import pytest

from isoform.training.schedule import Constant, Cosine, InverseSqrt, Linear, Noam, needs_total, rate


def at(schedule: object, step: int, total: int | None = 100) -> float:
    return rate(schedule, step, d_model=512, total=total)  # type: ignore[arg-type]


def test_noam_is_the_papers() -> None:
    schedule = Noam(warmup=4000)
    assert at(schedule, 1, None) == pytest.approx(512**-0.5 * 4000**-1.5)
    assert at(schedule, 4000, None) == pytest.approx(512**-0.5 * 4000**-0.5)
    assert at(schedule, 16000, None) == pytest.approx(512**-0.5 * 16000**-0.5)
    assert at(Noam(warmup=4000, factor=2.0), 77, None) == 2 * at(schedule, 77, None)


@pytest.mark.parametrize(
    "schedule",
    [
        InverseSqrt(lr=3.0, warmup=10),
        Cosine(lr=3.0, warmup=10),
        Linear(lr=3.0, warmup=10),
        Constant(lr=3.0, warmup=10),
    ],
)
def test_warmup_is_a_line_from_the_origin(schedule: object) -> None:
    for step in (1, 4, 10):
        assert at(schedule, step) == pytest.approx(3.0 * step / 10)


def test_after_the_warmup() -> None:
    assert at(InverseSqrt(lr=3.0, warmup=10), 40) == pytest.approx(1.5)
    cosine = Cosine(lr=3.0, warmup=10, final=0.1)
    assert at(cosine, 55) == pytest.approx(3.0 * (0.1 + 0.9 * 0.5))
    assert at(cosine, 40) == pytest.approx(3.0 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 3))))
    assert at(cosine, 100) == pytest.approx(0.3)
    linear = Linear(lr=3.0, warmup=10, final=0.1)
    assert at(linear, 28) == pytest.approx(3.0 * (0.1 + 0.9 * 0.8))
    assert at(linear, 100) == pytest.approx(0.3)
    assert at(linear, 120) == pytest.approx(0.3)
    assert at(Constant(lr=3.0, warmup=10), 10**6) == 3.0


def test_without_warmup() -> None:
    assert at(Constant(lr=3.0), 1) == 3.0
    assert at(Linear(lr=3.0), 25) == pytest.approx(2.25)
    assert at(Cosine(lr=3.0), 50) == pytest.approx(1.5)


def test_which_need_an_end() -> None:
    assert needs_total(Cosine(lr=1.0)) and needs_total(Linear(lr=1.0))
    assert not needs_total(Noam(warmup=1)) and not needs_total(Constant(lr=1.0))
