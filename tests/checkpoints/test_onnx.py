"""ONNX graphs give what the network gives: any batch and length, padding on both sides, the cache."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from isoform import config as c
from isoform.checkpoints import Bundle, export
from isoform.checkpoints.checked import Checked
from isoform.config import presets
from isoform.config.protocol import Protocol
from isoform.errors import ArtifactError, CheckError
from isoform.nn import build
from isoform.tokens import Tokens

runtime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

SIZES = {"d_model": 16, "n_heads": 4, "ffn_width": 24}
NTK = c.DynamicNtkScaling(factor=2.0, original_length=8)


def llama(**changes: Any) -> c.ModelConfig:
    base = presets.llama(40, **SIZES, n_kv_heads=2, n_layers=1, eps=1e-4)
    return base.replace(**changes) if changes else base


def bert(head: c.Head | None) -> c.ModelConfig:
    base = presets.bert(40, **SIZES, n_layers=1, max_positions=30)
    return base.replace(head=None if head is None else head)


QUICK: dict[str, c.ModelConfig] = {
    "a decoder": llama(decoder__layer__attention__window=5),
    "an encoder–decoder": presets.original(40, **SIZES, n_encoder_layers=1, n_decoder_layers=1),
    "an encoder": bert(c.PoolingHead(pooling="mean", pooler=None, normalise=True)),
}
GRID: dict[str, c.ModelConfig] = {
    "prefix": llama(decoder__visibility="prefix"),
    "dynamic ntk": llama(decoder__layer__attention__positions__scaling=NTK),
    "gpt2": presets.gpt2(40, **SIZES, n_layers=2, max_positions=30),
    "gemma2": presets.gemma2(40, **SIZES, n_kv_heads=2, n_layers=2),
    "mixtral": presets.mixtral(40, **SIZES, n_kv_heads=2, n_layers=2),
    "bloom": presets.bloom(40, d_model=16, n_heads=4, n_layers=2),
    "falcon": presets.falcon(40, **SIZES, n_layers=2),
    "t5": presets.t5(40, d_model=16, n_heads=4, head_width=6, ffn_width=24, n_layers=2),
    "bart": presets.bart(40, **SIZES, n_layers=2, max_positions=30),
    "albert": presets.albert(40, **SIZES, n_layers=2),
    "labels": bert(c.SequenceHead(n_labels=3, pooling="last", pooler=None, bias=True)),
    "states": bert(None),
}


def bundle_of(cfg: c.ModelConfig) -> Bundle:
    model = build(cfg, seed=0).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator), alpha=0.2)
    return Bundle(model, cfg, None, None, Protocol(pad_id=0, eos_ids=(2,), start=(1,)), {})


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Bundle, Path]]:
    """Tracing takes seconds, so each network is written once."""
    made: dict[str, tuple[Bundle, Path]] = {}

    def write(name: str) -> tuple[Bundle, Path]:
        if name not in made:
            bundle = bundle_of({**QUICK, **GRID}[name])
            made[name] = bundle, export(bundle, tmp_path_factory.mktemp("onnx") / "out", to="onnx")
        return made[name]

    return write


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(n, marks=pytest.mark.soak) for n in GRID)])
def test_written_and_run(name: str, written: Any) -> None:
    bundle, folder = written(name)
    figures = Checked.read(folder).engine
    assert figures is not None
    assert figures.difference < 1e-5
    assert figures.scores > (12 if name == "labels" else 40)  # labels of whole rows are few
    assert "onnxruntime" in figures.lines()[0]
    assert {m.backend for m in bundle.model.modules() if hasattr(m, "backend")} == {"auto"}
    state = json.loads((folder / "isoform_onnx.json").read_text(encoding="utf-8"))
    graph = state["graphs"][-1]
    session = runtime.InferenceSession(str(folder / graph["file"]))
    assert [i.name for i in session.get_inputs()] == [port["name"] for port in graph["inputs"]]
    assert [o.name for o in session.get_outputs()] == [port["name"] for port in graph["outputs"]]
    for given, port in zip(session.get_inputs(), graph["inputs"], strict=True):
        free = [isinstance(axis, str) for axis in port["axes"]]
        assert [isinstance(axis, str) for axis in given.shape] == free, given


def test_a_prompt_in_parts_and_another_batch(written: Any) -> None:
    """Sizes that were not traced: one row, seven rows, a prompt given in three parts."""
    runs = importlib.import_module("isoform.checkpoints.onnx.runtime")
    bundle, folder = written("a decoder")
    session = runs.Session(runtime, folder, bundle.config)
    for rows in (1, 7):
        ids = (torch.arange(rows * 11).view(rows, 11) * 7 + 3) % 40
        ours = bundle.model(Tokens(ids)).logits.detach()
        past, found = session.empty(rows), []
        for begin, end in ((0, 6), (6, 7), (7, 11)):
            mask = torch.ones(rows, end, dtype=torch.long)
            scores, past = session.step(ids[:, begin:end], mask, past, {})
            found.append(scores)
        assert past[0].shape[2] == 11
        assert torch.allclose(torch.cat(found, 1), ours, atol=1e-5)


def test_another_function_does_not_pass(written: Any) -> None:
    runs = importlib.import_module("isoform.checkpoints.onnx.runtime")
    _, folder = written("an encoder")
    bundle = bundle_of(QUICK["an encoder"])
    with torch.no_grad():
        bundle.model.encoder.layers[0].feed_forward.body.down.bias[3] += 0.5
    with pytest.raises(CheckError, match="onnxruntime's scores differ by"):
        runs.check(runtime, bundle, folder)


def test_other_types_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"float32, not torch\.bfloat16: convert the bundle first"):
        export(bundle_of(llama()).to(dtype=torch.bfloat16), tmp_path / "out", to="onnx")


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_the_libraries_are_asked_for(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ArtifactError, match=rf"needs the {package} library.*pip install 'isoform\[onnx\]'"):
        export(bundle_of(llama()), tmp_path / "out", to="onnx")
