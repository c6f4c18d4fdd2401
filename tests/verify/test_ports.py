"""docs/diagnose.md: three real porting bugs are named as the page says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from isoform.verify import diagnose

pytest.importorskip("transformers")

DOCS = Path(__file__).parents[2] / "docs"
INPUTS = {
    "input_ids": torch.arange(24).reshape(2, 12) * 7 % 61,
    "attention_mask": torch.tensor([[1] * 12, [1] * 9 + [0] * 3]),
}


@pytest.fixture(scope="module")
def ports():
    spec = importlib.util.spec_from_file_location("ports", DOCS / "ports.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "kind"), [("gemma", "activation"), ("llama", "rope-pairing"), ("gemma2", "softcap")]
)
def test_the_page_says_what_is_found(ports, name, kind):
    """One finding, in both layers, in the very words of the page."""
    found = diagnose(getattr(ports, name)(), getattr(ports, f"{name}_port")(), INPUTS).findings
    assert [finding.kind for finding in found] == [kind]
    page = (DOCS / "diagnose.md").read_text(encoding="utf-8")
    assert f"  {kind}: {found[0].statement}\n" in page


def test_a_model_is_itself(ports):
    assert not diagnose(ports.llama(), ports.llama(), INPUTS).findings
