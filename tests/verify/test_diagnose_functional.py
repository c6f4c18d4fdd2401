"""Stacked weights and einsum against modules: what is split before biases are added, and rows of stacks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from zoo.others.functional import Functional, Modules, loaded

from isoform.verify import Diagnosis, diagnose

IDS = torch.randint(1, 41, (3, 13), generator=torch.Generator().manual_seed(3))
MASK = torch.ones(3, 13, dtype=torch.long)
MASK[1, 9:], MASK[2, :4] = 0, 0


def _modules(
    fault: str = "", at: int | None = None, *, size: float = 0.3, vectors: float = 0.3, normed: bool = False
) -> nn.Module:
    model, generator = Modules(fault, at, normed), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * (vectors if parameter.dim() == 1 else size))
    return model.eval()


def _found(fault: str, at: int | None = None, *, turned: bool = False, other: str = "", **how) -> Diagnosis:
    a = _modules(other, at, **how)
    b = loaded(Functional(fault, at, how.get("normed", False)), a).eval()
    ours, theirs = {"input_ids": IDS, "attention_mask": MASK}, {"tokens": IDS, "mask": MASK}
    return diagnose(b, a, theirs, ours) if turned else diagnose(a, b, ours, theirs)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    "how", [{}, {"normed": True}, {"vectors": 0.0}, {"size": 0.02}, {"size": 0.02, "vectors": 0.0}]
)
def test_another_way_is_no_fault(turned: bool, how: dict[str, float]) -> None:
    assert _found("", turned=turned, **how).verdict == "equivalent"


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("fault", "kind", "how"),
    [
        ("key-bias", "bias-missing", {}),
        ("value-bias", "bias-missing", {}),
        ("value-bias", "bias-missing", {"vectors": 0.0}),  # seen by the probe alone
        ("gate-bias", "bias-missing", {}),
        ("kv-head-order", "kv-head-order", {}),
        ("norm-instance", "norm-missing", {}),
        ("rope-partial", "rope-partial", {}),
        ("norm-offset", "norm-offset", {"normed": True}),
        ("norm-offset", "norm-offset", {"vectors": 0.0}),
        ("clamp", "unexplained", {}),
        ("sink", "unexplained", {}),
        ("skip-missing", "unexplained", {}),
        ("embedding-again", "unexplained", {}),
    ],
)
def test_a_fault_is_named_in_its_layer(fault: str, kind: str, how: dict[str, float], turned: bool) -> None:
    found = _found(fault, 0, turned=turned, **how)
    assert set(found.kinds()) == {kind}, str(found)
    if kind != "unexplained":
        assert {p.layer for f in found.findings for p in f.where} <= {0, None}, str(found)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("fault", "kind"), [("rope-partial", "rope-partial"), ("gate-bias", "bias-missing")])
def test_a_fault_of_the_modules(fault: str, kind: str, turned: bool) -> None:
    assert _found("", 1, turned=turned, other=fault).kinds() == (kind,)


def test_a_place_that_only_the_probe_shows_belongs_to_the_finding() -> None:
    found = _found("kv-head-order", size=0.02)
    assert {p.layer for f in found.findings for p in f.where} == {0, 1}, str(found)


def test_heads_are_counted_alike_in_both() -> None:
    words = _found("kv-head-order").findings[0].statement
    assert "0, 0, 0, 1, 1, 1" in words and "0, 1, 0, 1, 0, 1" in words


def test_a_sink_is_said_of_the_attention() -> None:
    places = {(p.layer, p.part) for f in _found("sink", 1, turned=True).findings for p in f.where}
    assert places == {(1, "self-attention")}
