"""Models in styles of other people's: what is planted is named, what is in no list is placed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from zoo.others.cases import FORMS, LISTED, SOUND, UNLISTED, Other, models

from isoform.verify import diagnose


def _some(cases: list[Other], every: int) -> list:
    return [
        pytest.param(case, marks=[pytest.mark.long] if i % every else [], id=str(case))
        for i, case in enumerate(cases)
    ]


@pytest.mark.parametrize("case", _some(SOUND, 2))
def test_sound_twins_are_not_accused(case: Other) -> None:
    a, b, inputs = models(case)
    found = diagnose(a, b, inputs)
    assert not found.findings, str(found)


TURNED = [c for c in (*LISTED, *UNLISTED) if c.form.startswith(("sequential", "buckets", "patches"))]


@pytest.mark.parametrize("case", TURNED)
def test_either_model_can_be_the_wrong_one(case: Other) -> None:
    a, b, inputs = models(case)
    found = diagnose(b, a, inputs, probe=False)
    assert sorted(x.kind for x in found.findings) == sorted(case.found), str(found)
    if "at" in case.rest:
        places = [place for finding in found.findings for place in finding.where]
        assert {place.layer for place in places} == {case.rest["at"]}, str(found)


def test_which_of_them_counts_real_tokens_is_said() -> None:
    a, b, inputs = models(Other("sequential", ("position-padding",), ()))
    words = "the reference counts {}, the candidate counts {}".format
    real, places = "real tokens", "places, padding too"
    assert diagnose(a, b, inputs).findings[0].statement == words(places, real)
    assert diagnose(b, a, inputs).findings[0].statement == words(real, places)


def test_projections_that_are_exchanged_are_said() -> None:
    a, b, inputs = models(Other("buckets", ("key-value",), ()))
    found = diagnose(a, b, inputs)
    assert "the candidate makes k of the rows of v, v of the rows of k" in found.findings[0].statement


@pytest.mark.parametrize("case", [*_some(LISTED, 5), *_some(UNLISTED, 4)])
def test_every_fault_is_named_or_placed(case: Other) -> None:
    a, b, inputs = models(case)
    turned = diagnose(b, a, inputs, probe=False)
    assert sorted(f.kind for f in turned.findings) == sorted(case.found), str(turned)
    found = diagnose(a, b, inputs, probe=False)
    assert sorted(x.kind for x in found.findings) == sorted(case.found), str(found)
    if case.found:
        places = [place for finding in found.findings for place in finding.where]
        assert places[0].part.startswith(case.part), str(found)
        if "at" in case.rest:
            assert {place.layer for place in places} == {case.rest["at"]}, str(found)


@pytest.mark.parametrize(
    ("form", "fault", "kind"),
    [
        ("nano", "activation", "activation"),  # the two GELUs
        ("nano", "logit-cap", "softcap"),
        ("annotated", "position-offset", "position-offset"),
        ("annotated", "attention-scale", "attention-scale"),
        ("general", "norm-eps", "norm-eps"),
    ],
)
def test_a_port_in_bfloat16_hides_nothing(form: str, fault: str, kind: str) -> None:
    a, b, inputs = models(Other(form, (), ()))
    assert not diagnose(a, b.bfloat16(), inputs).findings
    a, b, inputs = models(Other(form, (fault,), ()))
    found = diagnose(a, b.bfloat16(), inputs)
    assert found.kinds() == (kind,), str(found)


@pytest.mark.parametrize("form", ["nano", "sandwich"])
def test_gains_that_are_all_one_hide_no_norm_of_another_place(form: str) -> None:
    kind, config, inputs = FORMS[form]
    torch.manual_seed(0)
    a: Any = kind(**config).eval()
    for weight in a.parameters():
        if weight.dim() > 1:
            nn.init.normal_(weight, std=0.02)
    for fault, wanted in ((), ()), (("norm-instance",), ("norm-missing",)):
        b: Any = a.ported(*fault) if hasattr(a, "ported") else kind(*fault, **config)
        if not hasattr(a, "ported"):
            b.load_state_dict(a.state_dict())
        for pair in ((a, b.eval()), (b.eval(), a)):
            found = diagnose(*pair, inputs)
            assert tuple(f.kind for f in found.findings) == wanted, str(found)
            assert all(f.latent for f in found.findings)


def test_a_lost_sum_and_another_order_are_told_as_such() -> None:
    for fault, words in (
        ("skip-missing", "adds up one contribution here"),
        ("order", "runs its parts in one order"),
    ):
        a, b, inputs = models(Other("nano", (fault,), ()))
        (found,) = diagnose(b, a, inputs, probe=False).findings
        assert words in found.statement
        sums = {place.part for place in found.where}
        assert fault == "order" or sums == {"sum of the stream"}, str(found)


def test_the_epsilon_of_a_query_norm_is_measured() -> None:
    a, b, inputs = models(Other("patches", ("qk-eps",), ()))
    (found,) = diagnose(a, b, inputs, probe=False).findings
    assert found.evidence["reference"] == pytest.approx(1e-5, rel=0.02)
    assert found.evidence["candidate"] == pytest.approx(0.02, rel=0.02)
