"""Cached steps and losses: what one forward pass does not show."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from zoo.cached import Cached
from zoo.cases import IDS
from zoo.steps import randomise

from isoform.verify import diagnose
from verify.leaky import Leaky, step

SLUGS = {
    "ahead": "position-decode",
    "behind": "position-decode",
    "reset": "position-decode",
    "layer-counter": "position-decode",
    "rolled": "cache-content",
    "top-left": "causal-alignment",
}


@pytest.mark.parametrize(
    ("fault", "rotary"),
    [
        (fault, rotary)
        for fault in SLUGS
        for rotary in (True, False)
        if rotary or fault != "layer-counter"  # which counts for the rotation
    ],
)
def test_steps_with_a_past(fault: str, rotary: bool) -> None:
    a = randomise(Cached(rotary=rotary)).double()
    b = Cached(fault, rotary=rotary).double().eval()
    b.load_state_dict(a.state_dict())
    pair = (a, b) if rotary else (b, a)
    found = diagnose(*pair, {"ids": IDS})
    assert found.kinds() == (SLUGS[fault],), str(found)
    assert "in_the_step" in found.findings[0].evidence or fault == "top-left"
    assert diagnose(a, b, {"ids": IDS}, probe=False).verdict == "equivalent"  # one pass is the same


@pytest.mark.parametrize("rotary", [True, False])
def test_sound_steps(rotary: bool) -> None:
    a = randomise(Cached(rotary=rotary)).double()
    assert diagnose(a, a, {"ids": IDS}).verdict == "equivalent"


def test_a_step_function() -> None:
    model = leaky("")
    inputs = {"ids": IDS[:, :7].clamp(max=28)}
    sound, wrong = step(model), step(model, ahead=1)
    assert diagnose(model, model, inputs, step=sound, candidate_step=sound).verdict == "equivalent"
    (finding,) = diagnose(model, model, inputs, step=sound, candidate_step=wrong).findings
    assert "first at position 1" in finding.statement


def leaky(fault: str) -> Leaky:
    model = Leaky(fault).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
    return model


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("double-shift", "the label after the next and averages over tokens"),
        ("no-shift", "the label at the same place and averages over tokens"),
        ("mean-of-means", "the next label and averages over rows"),
    ],
)
def test_losses(fault: str, said: str) -> None:
    a = leaky("")
    b = Leaky(fault).eval()
    b.load_state_dict(a.state_dict())
    real = torch.tensor([[1] * 7, [1] * 5 + [0] * 2, [1] * 4 + [0] * 3])
    inputs = {"ids": IDS[:, :7].clamp(max=28), "attention_mask": real}
    assert diagnose(a, a, inputs).verdict == "equivalent"
    (finding,) = diagnose(a, b, inputs).findings
    assert finding.kind == "loss-accounting"
    assert finding.statement.endswith(said)
