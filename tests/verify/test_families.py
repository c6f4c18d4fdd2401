"""Ours against theirs for every family: one function, so no accusation; their paths and precisions too."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import isoform as iso

transformers = pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoints"))
parity = importlib.import_module("parity")
decoders, llama_like, encoders, encoder_decoders = (
    importlib.import_module(f"test_{name}")
    for name in ("decoders", "llama_like", "encoders", "encoder_decoders")
)

ALWAYS = ("gpt2", "llama", "electra-replaced", "t5")
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{name: case[:3] for name, case in decoders.CASES.items()},
    **{
        name: (f"{family}Config", f"{family}ForCausalLM", {**llama_like.SMALL, **changes})
        for name, (family, changes) in llama_like.CASES.items()
    },
    **{name: (f"{f}Config", f"{f}{head}", settings) for name, (f, head, settings) in encoders.CASES.items()},
    **encoder_decoders.CASES,
}


def grid(always: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in always else [pytest.mark.long]) for name in CASES]


def theirs(name: str, attention: str = "eager", dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    kind, cls, settings = CASES[name]
    config = getattr(transformers, kind)(**settings)
    config._attn_implementation = attention
    torch.manual_seed(0)
    return parity.perturb(getattr(transformers, cls)(config)).to(dtype)


def inputs(name: str, model: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same ragged rows as theirs takes them and as ours does."""
    kind = CASES[name][0]
    if name in encoder_decoders.CASES:
        source = parity.ragged(53, (13, 4, 9), "right", seed=3)
        target = parity.ragged(53, (17, 9, 3), "right", seed=4)
        given = {
            "input_ids": source.ids,
            "attention_mask": source.real_or_ones().long(),
            "decoder_input_ids": target.ids,
            "decoder_attention_mask": target.real_or_ones().long(),
        }
        return given, {"tokens": target, "source": source}
    tokens = parity.ragged(61, (17, 9, 3), "right")
    if "oberta" in kind.lower():  # padding is recognised by its id there
        tokens = dataclasses.replace(tokens, ids=tokens.ids.masked_fill(~tokens.real_or_ones(), 1))
    positions = name in llama_like.CASES or (name in decoders.CASES and decoders.CASES[name][3])
    return parity.their_inputs(tokens, positions=positions), {"tokens": tokens}


def no_accusation(a: Any, b: Any, given: Any, other: Any, verdicts: tuple[str, ...]) -> None:
    found = iso.verify.diagnose(a, b, given, other)
    assert found.findings == () and found.verdict in verdicts, str(found)
    rows = iso.verify.compare(a, b, given, other)
    assert rows.verdict in ("equivalent", "noise"), str(rows)
    assert any(row.name.startswith("result") and row.shape for row in rows.rows)


@pytest.mark.parametrize("name", grid(ALWAYS))
def test_ours_and_theirs_are_one_function(name: str, tmp_path: Path) -> None:
    # With ALiBi Falcon's eager path adds the distances twice, its fused one once.
    model = theirs(name, "sdpa" if name == "falcon-alibi" else "eager")
    model.save_pretrained(tmp_path)
    ours = iso.load(tmp_path, dtype=torch.float32).model
    no_accusation(model, ours, *inputs(name, model), ("equivalent",))


# Their fused path is another function here: it knows no cap on scores and no factor by layer.
FUSED_DIFFERS = {
    "gemma2": "softcap",
    "gpt2-by-layer": "attention-scale",
    "falcon-alibi": "alibi-slope",
    "gpt2-unscaled": "attention-scale",
}


@pytest.mark.parametrize("name", grid(("bert", "bart")))
def test_eager_and_fused(name: str) -> None:
    if not getattr(transformers, CASES[name][1])._supports_sdpa:
        pytest.skip("transformers has one path for it")
    eager, fused = theirs(name), theirs(name, "sdpa")
    given, _ = inputs(name, eager)
    if name in FUSED_DIFFERS:
        found = iso.verify.diagnose(eager, fused, given)
        assert found.kinds() == (FUSED_DIFFERS[name],), str(found)
        return
    no_accusation(eager, fused, given, given, ("equivalent", "noise"))


@pytest.mark.parametrize("name", grid(("qwen2",)))
def test_float32_and_bfloat16(name: str) -> None:
    whole, coarse = theirs(name, dtype=torch.bfloat16).float(), theirs(name, dtype=torch.bfloat16)
    given, _ = inputs(name, whole)
    no_accusation(whole, coarse, given, given, ("noise",))


@pytest.mark.parametrize("name", ["bert-model", "gpt2"])
def test_a_fault_is_seen_whatever_the_result_is_the_output_of(name: str) -> None:
    """BERT without a head ends in a layer's norm, a point of the stream as well as the result."""
    model, other = theirs(name), theirs(name)
    last = [m for m in other.modules() if isinstance(m, torch.nn.LayerNorm)][-1]
    last.eps = 1e-2
    given, _ = inputs(name, model)
    assert iso.verify.compare(model, other, given, given).verdict == "differs"
    assert iso.verify.diagnose(model, other, given).kinds() == ("norm-eps",)
