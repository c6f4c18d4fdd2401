"""The chapter's worked example (R29), held against numbers computed outside this library."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from isoform.errors import ConfigError
from isoform.verify.worked_example import contrast, worked_example

GOLDEN = Path(__file__).parent / "worked_example.json"


def by_hand(*, allowed: np.ndarray, placement: str, norm: str, eps: float) -> dict[str, np.ndarray]:
    """The same chain in NumPy, from the equations."""
    x = np.array([[1.0, 3.0], [4.0, 2.0]])
    w1 = np.array([[1.0, 0, 1], [0, 1, -1]])
    w2 = np.array([[1.0, 0], [0, 1], [1, -1]])
    w_out = np.array([[1.0, 0, -1], [0, 1, 1]])

    def normalise(v: np.ndarray) -> np.ndarray:
        centre = v.mean(-1, keepdims=True) if norm == "layer" else 0.0
        return (v - centre) / np.sqrt(((v - centre) ** 2).mean(-1, keepdims=True) + eps)

    def softmax(v: np.ndarray) -> np.ndarray:
        e = np.exp(v - v.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    out: dict[str, np.ndarray] = {}
    h = normalise(x) if placement == "pre" else x
    out["scores"] = h @ h.T / math.sqrt(2)
    out["attention_weights"] = softmax(np.where(allowed, out["scores"], -np.inf))
    out["attention_output"] = out["attention_weights"] @ h
    out["residual1"] = x + out["attention_output"]
    after = normalise(out["residual1"])
    out["norm1"] = h if placement == "pre" else after
    out["ffn_preactivation"] = after @ w1
    out["ffn_hidden"] = np.maximum(out["ffn_preactivation"], 0)
    out["ffn_output"] = out["ffn_hidden"] @ w2
    out["residual2"] = (out["residual1"] if placement == "pre" else after) + out["ffn_output"]
    last = normalise(out["residual2"])
    out["norm2"] = after if placement == "pre" else last
    if placement == "pre":
        out["final_norm"] = last
    out["logits"] = last @ w_out
    out["probabilities"] = softmax(out["logits"])
    out["loss_targets_B_A"] = -np.log(out["probabilities"][[0, 1], [1, 0]]).mean()
    return out


CASES = {
    "pre_ln_causal_eps0": {"visibility": "causal", "eps": 0.0},
    "pre_ln_bidirectional_eps0": {"visibility": "bidirectional", "eps": 0.0},
    "pre_ln_causal_eps1e-5": {"visibility": "causal", "eps": 1e-5},
    "pre_ln_bidirectional_eps1e-5": {"visibility": "bidirectional", "eps": 1e-5},
    "post_ln_causal_eps1e-5": {"placement": "post", "eps": 1e-5},
    "pre_rms_causal_eps1e-5": {"norm": "rms", "eps": 1e-5},
}


@pytest.mark.parametrize("case", CASES)
def test_the_chapters_numbers(case: str):
    expected = json.loads(GOLDEN.read_text())[case]
    found = worked_example(**CASES[case])
    for name, value in expected.items():
        np.testing.assert_allclose(found[name].numpy(), value, rtol=0, atol=1e-9, err_msg=name)
    # Their order is the order of computation, whatever stands between.
    names = [step.name for step in found.steps if step.name in expected]
    assert names == list(expected)


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("eps", [0.0, 1e-12, 0.37])
@pytest.mark.parametrize(
    ("visibility", "prefix", "allowed"),
    [
        ("causal", 2, [[1, 0], [1, 1]]),
        ("bidirectional", 0, [[1, 1], [1, 1]]),
        ("prefix", 0, [[1, 0], [1, 1]]),
        ("prefix", 1, [[1, 0], [1, 1]]),
        ("prefix", 2, [[1, 1], [1, 1]]),
    ],
)
def test_every_setting_against_numpy(placement, norm, eps, visibility, prefix, allowed):
    found = worked_example(visibility=visibility, placement=placement, norm=norm, eps=eps, prefix=prefix)
    expected = by_hand(allowed=np.array(allowed) == 1, placement=placement, norm=norm, eps=eps)
    assert found.allowed == (np.array(allowed) == 1).tolist()
    assert {step.name for step in found.steps} == {"input", *expected}
    for name, value in expected.items():
        assert found[name].dtype == torch.float64
        np.testing.assert_allclose(found[name].numpy(), value, rtol=0, atol=1e-12, err_msg=name)


def test_a_leak_that_the_loss_does_not_show():
    """Exercise 6.9: the loss is the same, the first position has read the second."""
    causal, leaking = worked_example(), worked_example(visibility="bidirectional")
    assert causal.loss == pytest.approx(leaking.loss, abs=1e-12)
    difference = (causal["residual1"] - leaking["residual1"]).abs()
    assert difference[0].max() > 0.1 and difference[1].max() < 1e-12


def test_contrast_names_the_other_visibility_and_the_difference():
    seen = contrast(worked_example())
    assert seen.against == "bidirectional" and seen.loss < 1e-12
    assert seen.residual1 == pytest.approx((0.11161443841433938, 0), abs=1e-12)
    assert contrast(worked_example(visibility="prefix", prefix=2)).against == "causal"
    assert contrast(worked_example(norm="rms")).loss > 1e-9


def test_equation_numbers_follow_the_chapter():
    numbers = {step.name: step.equation for step in worked_example().steps}
    assert numbers == {
        "input": "6.37", "norm1": "6.40", "scores": "6.41", "attention_weights": "6.41",
        "attention_output": "6.42", "residual1": "6.42", "norm2": "6.43", "ffn_preactivation": "6.44",
        "ffn_hidden": "6.45", "ffn_output": "6.46", "residual2": "6.47", "final_norm": "6.48",
        "logits": "6.48", "probabilities": "6.49", "loss_targets_B_A": "6.50",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eps": -1e-5}, "eps"),
        ({"eps": math.nan}, "eps"),
        ({"placement": "sandwitch"}, "placement"),
        ({"visibility": "prefix", "prefix": 3}, "the worked example has 2 positions"),
    ],
)
def test_settings_that_are_none(settings, message):
    with pytest.raises(ConfigError, match=message):
        worked_example(**settings)
