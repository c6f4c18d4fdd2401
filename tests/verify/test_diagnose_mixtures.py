"""Experts in loops against experts in one einsum: what is added up inside a mixture is no stream."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from zoo.others.mixtures import Mixtures, alike
from zoo.steps import randomise

from isoform.verify import diagnose

IDS = torch.randint(1, 37, (6, 13), generator=torch.Generator().manual_seed(5))
KINDS = {
    "": None,
    **dict.fromkeys(("top-one", "sigmoid", "as they are"), "expert-routing"),
    **dict.fromkeys(("gate-bias", "down-bias"), "bias-missing"),
    "activation": "activation",
    "norm-eps": "norm-eps",
}
STYLES = [
    *(("where", "together"), ("together", "where"), ("all", "together"), ("together", "all")),
    ("where", "all"),
]


@pytest.mark.parametrize(
    ("fault", "styles"),
    [
        pytest.param(fault, styles, marks=[pytest.mark.long] if (i + j) % 5 else [])
        for i, fault in enumerate(KINDS)
        for j, styles in enumerate(STYLES)
    ],
)
def test_a_fault_of_a_mixture(fault: str, styles: tuple[str, str]) -> None:
    loop = randomise(Mixtures("all"))
    assert isinstance(loop, Mixtures)
    a, b = alike(loop, styles[0]), alike(loop, styles[1], fault)
    found = diagnose(a, b, {"ids": IDS}, probe=False)
    assert found.kinds() == (() if KINDS[fault] is None else (KINDS[fault],)), str(found)
    for place in (p for finding in found.findings for p in finding.where):
        assert place.layer == 1, str(found)
        if KINDS[fault] not in ("expert-routing", "norm-eps"):
            modules = f"{place.part} {place.reference} {place.candidate}"
            assert "of expert 2" in modules or "experts.2" in modules, str(found)


def test_an_expert_with_one_token_keeps_nothing_from_being_compared() -> None:
    """A product of one row is recorded in another form, that takes no other number of tokens."""
    loop = randomise(Mixtures("all"))
    assert isinstance(loop, Mixtures)
    a, b = alike(loop, "together"), alike(loop, "where", "gate-bias")
    found = diagnose(a, b, {"ids": IDS[:4, :11]}, probe=False)
    assert not any("cannot be run" in finding.statement for finding in found.findings), str(found)
    assert "bias-missing" in found.kinds()
