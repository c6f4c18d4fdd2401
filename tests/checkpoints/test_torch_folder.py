"""Exported for torch.nn: its own modules read the files, and what is opened again is the same bit for bit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from isoform.checkpoints import Bundle, export, load
from isoform.checkpoints.checked import Checked
from isoform.cli import main
from isoform.config import ModelConfig, SequenceHead, presets
from isoform.config.protocol import Protocol
from isoform.data import Characters, Tokenizer
from isoform.errors import ArtifactError
from isoform.nn import build, capture
from isoform.tokens import Tokens

DOCS = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"
SIZES = {"d_model": 12, "n_heads": 3, "ffn_width": 8, "n_encoder_layers": 2, "n_decoder_layers": 3}


def shaken(cfg: ModelConfig, dtype: torch.dtype = torch.float64) -> Bundle:
    model = build(cfg, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.rand(p.shape, generator=generator, dtype=torch.float64).to(p.dtype) - 0.5)
    protocol = Protocol(pad_id=0, eos_ids=(2,), start=(1,))
    return Bundle(model.to(dtype).eval(), cfg, None, None, protocol, {})


CASES: dict[str, ModelConfig] = {
    "whole": presets.torch_nn(20, **SIZES),
    "pre, without biases": presets.torch_nn(20, **SIZES, norm_first=True, bias=False, activation="gelu"),
    "silu": presets.torch_nn(20, **SIZES, activation="silu"),
    "gelu_tanh": presets.torch_nn(20, **SIZES, activation="gelu_tanh"),
    "post, no norm at the end": presets.torch_nn(20, **SIZES).replace(
        encoder__final_norm=None, decoder__final_norm=None, decoder__layer__attention__dropout=0.25
    ),
    "two vocabularies": presets.torch_nn(20, **SIZES).replace(
        tie_source=False, source__vocabulary="source", source__vocab_size=17
    ),
    "encoder": presets.torch_nn(20, **SIZES).replace(
        decoder=None, source=None, tie_source=False,
        head=SequenceHead(n_labels=3, pooling="mean", pooler=None, bias=True),
    ),
}  # fmt: skip


def recipe() -> dict[str, Any]:
    """The code of the documentation, which knows torch alone."""
    text = DOCS.read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(import json\n.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    return names


@pytest.mark.parametrize("name", CASES)
def test_plain_modules_read_it(name: str, tmp_path: Path) -> None:
    bundle = shaken(CASES[name])
    export(bundle, tmp_path / "out", to="torch")
    module: nn.Module = recipe()["module"](tmp_path / "out").double().eval()
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(3, 17, (n,), generator=generator).tolist() for n in (9, 4, 1)]
    both = bundle.config.source is not None
    for side in ("right", "left"):
        tokens = Tokens.from_lists(rows, pad_id=0, side=side)
        source = Tokens.from_lists(rows[::-1], pad_id=0) if both else None
        with torch.no_grad(), capture(bundle.model, "*embedding.output") as seen:
            ours = bundle.model(tokens, source)
        real = tokens.real_or_ones()
        x = seen["embedding.output"]
        if source is None:
            found = module(x, src_key_padding_mask=~real)
        else:
            later = torch.ones(9, 9, dtype=torch.bool).triu(1)
            # A row of padding alone sees nothing there, and would be NaN.
            later = later[None] | ~real[:, None] if side == "left" else later
            later = later & ~torch.eye(9, dtype=torch.bool) if side == "left" else later
            found = module(
                seen["source_embedding.output"], x,
                tgt_mask=later.repeat_interleave(3, 0) if later.dim() == 3 else later,
                src_key_padding_mask=~source.real_or_ones(),
                memory_key_padding_mask=~source.real_or_ones(),
            )  # fmt: skip
        assert (found - ours.hidden)[real].abs().max() <= 1e-10 * ours.hidden[real].abs().max()
    again = load(tmp_path / "out")
    assert (again.config, again.protocol) == (bundle.config, bundle.protocol)
    for (key, a), b in zip(bundle.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b), key
    first = module.encoder.layers[0] if both else module.layers[0]
    layer = bundle.config.stack.layer if bundle.config.encoder is None else bundle.config.encoder.layer
    assert first.dropout1.p == layer.residual_dropout
    assert first.self_attn.dropout == layer.attention.dropout


def test_the_check_is_stored(tmp_path: Path) -> None:
    folder = export(shaken(CASES["whole"], torch.bfloat16), tmp_path / "out", to="torch")
    checked = Checked.read(folder)
    assert checked.engine is not None
    assert checked.probe is not None
    assert checked.engine.engine == "torch.nn"
    assert checked.engine.difference <= 1e-5
    assert checked.probe.tokens > 0
    assert {p.dtype for p in load(folder).model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in load(folder, dtype=torch.float32).model.parameters()} == {torch.float32}


def test_vocabularies_come_along(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train(Characters(vocab_size=20), ["hello wide world"], where="here")
    bundle = shaken(presets.torch_nn(40, **SIZES))
    bundle = Bundle(bundle.model, bundle.config, tokenizer, tokenizer, bundle.protocol, {})
    again = load(export(bundle, tmp_path / "out", to="torch"))
    assert again.tokenizer is not None
    assert again.tokenizer is again.source_tokenizer
    assert again.tokenizer.digest == tokenizer.digest


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shaken(CASES["whole"]).save(tmp_path / "artifact")
    assert main(["export", str(tmp_path / "artifact"), str(tmp_path / "out"), "--to", "torch"]) == 0
    assert "scores of ragged rows differ by" in capsys.readouterr().out
    assert main(["import", str(tmp_path / "out"), str(tmp_path / "back")]) == 0


def test_what_it_cannot_say(tmp_path: Path) -> None:
    alone = presets.gpt2(20, d_model=12, n_heads=3, ffn_width=8, n_layers=1)
    windowed = CASES["whole"].replace(decoder__layer__attention__window=3)
    for cfg, message in (
        (alone, "no decoder without cross-attention"),
        (windowed, r"attention\.window = 3"),
    ):
        with pytest.raises(ArtifactError, match=message):
            export(shaken(cfg), tmp_path / "out", to="torch")
        assert not (tmp_path / "out").exists()


def test_damaged(tmp_path: Path) -> None:
    folder = export(shaken(CASES["whole"]), tmp_path / "out", to="torch")
    path = folder / "torch_nn.json"
    state = json.loads(path.read_text(encoding="utf-8"))
    for change, message in (
        ({"format": 9}, "format 9 is unknown"), ({"config": {}}, "torch_nn.json: config"),
        ({"config": {**state["config"], "d_model": 24}}, "torch_nn.json|wrong shape"),
    ):  # fmt: skip
        path.write_text(json.dumps({**state, **change}), encoding="utf-8")
        with pytest.raises(ArtifactError, match=message) as caught:
            load(folder)
        assert "\n" not in str(caught.value)
