"""Configurations of every family drawn by a seed: scores, gradients, greedy and beam tokens, round trip.

What varies is in `sampled`. Padding is ragged on both sides and rows are longer than every window.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from isoform.checkpoints import load
from isoform.generation import Beam, Greedy, generate
from isoform.tokens import Tokens

transformers = pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))
parity = importlib.import_module("parity")
sampled = importlib.import_module("sampled")

SEEDS = 8
SHORT = {("albert", 1), ("roberta", 2), ("bart", 0), ("t5", 0), ("falcon", 0), ("gemma3_text", 0)}
GRID = [
    pytest.param(family, seed, marks=() if (family, seed) in SHORT else pytest.mark.long)
    for family in sampled.ALL
    for seed in range(SEEDS)
]
PADDING_BY_ID = ("roberta", "xlm-roberta", "m2m_100")


def scattered(model: nn.Module, seed: int) -> nn.Module:
    """Every parameter, and buffers that are trained like one, moved so that nothing is zero or one."""
    generator = torch.Generator().manual_seed(seed)
    fixed = {id(p) for m in model.modules() if "Sinusoidal" in type(m).__name__ for p in m.parameters()}
    trained = dict(model.named_buffers())
    moved = [*model.named_parameters(), *((n, b) for n, b in trained.items() if n.endswith("logits_bias"))]
    model.double()
    with torch.no_grad():
        for name, p in moved:
            if id(p) in fixed or (not p.requires_grad and not name.endswith("logits_bias")):
                continue
            noise = torch.rand(p.shape, generator=generator, dtype=torch.float64) * 2 - 1
            wide = p.dim() > 1 and "embed" not in name
            p.copy_(noise * (1.7 / p.shape[-1] ** 0.5)) if wide else p.add_(noise, alpha=0.6)
    return model.eval()


def made(sample: Any, seed: int) -> nn.Module:
    config = getattr(transformers, sample.config)(**sample.settings)
    # Falcon's eager path adds the ALiBi bias twice; its fused one, the default, once.
    config._attn_implementation = "sdpa" if sample.settings.get("alibi") else "eager"
    torch.manual_seed(0)
    return scattered(getattr(transformers, sample.cls)(config, **sample.options), seed)


def rows(lengths: tuple[int, ...], side: str, seed: int, pad: int) -> Tokens:
    """Ragged rows; ids 6 to 60 mean nothing special anywhere."""
    tokens = parity.ragged(sampled.VOCABULARY, lengths, side, seed=seed, low=6)
    return dataclasses.replace(tokens, ids=tokens.ids.masked_fill(~tokens.real_or_ones(), pad))


def result_of(cls: str) -> str:
    heads = ("GPT2LMHeadModel", "MarianMTModel")
    return "last_hidden_state" if cls.endswith("Model") and cls not in heads else "logits"


def encoder(case: Any, family: str, sample: Any, pad: int) -> None:
    types = sample.settings.get("type_vocab_size", 0)
    for side in ("right", "left"):
        tokens = rows((sampled.LONGEST, 9, 3), side, 1, pad)
        theirs = parity.their_inputs(tokens, positions=False)
        if side == "left" and family not in PADDING_BY_ID:
            if family == "distilbert":  # takes no positions
                continue
            theirs["position_ids"] = tokens.positions()
        if types:
            marks = (torch.arange(sampled.LONGEST) % types).expand(3, -1).contiguous()
            tokens, theirs["token_type_ids"] = dataclasses.replace(tokens, token_types=marks), marks
        pooled = case.bundle.config.head is not None and sample.cls.endswith("Model")
        if side == "left" and (pooled or sample.cls.endswith("SequenceClassification")):
            with torch.no_grad():  # theirs reads the first column, which is padding
                right = case.bundle.model(tokens.padded("right")).pooled
                parity.close(case.bundle.model(tokens).pooled, right, "padding side", 1e-12)
        if side == "right" or not sample.cls.endswith("SequenceClassification"):
            parity.compare_outputs(case, tokens, theirs, name=result_of(sample.cls))
        if pooled and side == "right":
            parity.compare_outputs(case, tokens, theirs, name="pooler_output")


def encoder_decoder(case: Any, family: str, sample: Any, pad: int) -> None:
    target = rows((13, sampled.LONGEST, 3), "right", 4, pad)
    for side in ("right", "left"):
        source = rows((sampled.LONGEST, 4, 9), side, 3, pad)
        if side == "left" and family not in ("t5", "mt5", "m2m_100"):  # their positions count padding
            with torch.no_grad():
                right = case.bundle.model(target, source.padded("right")).hidden
                parity.close(case.bundle.model(target, source).hidden, right, "padding side", 1e-12)
            continue
        theirs = {
            "input_ids": source.ids, "attention_mask": source.real_or_ones().long(),
            "decoder_input_ids": target.ids, "decoder_attention_mask": target.real_or_ones().long(),
        }  # fmt: skip
        parity.compare_outputs(case, target, theirs, source, name=result_of(sample.cls))
    if case.bundle.config.head is not None:
        source = rows((11, 4, 9), "right", 5, pad)
        start = Tokens(torch.full((3, 1), case.bundle.protocol.start[0]))
        generation(case, start, source)


def decoder(case: Any, family: str, sample: Any, pad: int) -> None:
    positions = "position_ids" in inspect.signature(case.hf.forward).parameters
    counts = positions or family in ("bloom", "opt")  # classes that count the real tokens themselves
    for side in ("right", "left") if counts else ("right",):
        tokens = rows((sampled.LONGEST, 9, 3), side, 1, pad)
        theirs = parity.their_inputs(tokens, positions=positions and family != "opt")
        parity.compare_outputs(case, tokens, theirs, name=result_of(sample.cls))
    if case.hf.can_generate() and case.bundle.config.head is not None:
        generation(case, rows((9, 4, 6), "left", 2, pad), None)


def generation(case: Any, prompt: Tokens, source: Tokens | None) -> None:
    """Greedy and four beams, eight tokens at most."""
    read = prompt if source is None else source
    for width in (1, 4):
        search = Greedy() if width == 1 else Beam(4, length_penalty="length")
        ours = generate(
            case.bundle.model, prompt, source=source, max_new_tokens=8, protocol=case.bundle.protocol,
            search=search,
        )  # fmt: skip
        with parity.honest_float64():
            theirs = case.hf.generate(
                read.ids, attention_mask=read.real_or_ones().long(), max_new_tokens=8, do_sample=False,
                num_beams=width, length_penalty=1.0, early_stopping=False,
                use_cache=case.hf.config.model_type not in ("t5", "mt5"),  # sized by the encoder's layers
            )  # fmt: skip
        for mine, row in zip(ours.ids, theirs[:, prompt.length :].tolist(), strict=True):
            assert mine == row[: row.index(2) if 2 in row else len(row)], (width, row)


class OneColumn(nn.Module):
    """The discriminator's scores with the axis of labels that it drops."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: torch.Tensor) -> Any:
        output = self.inner(**inputs)
        output.logits = output.logits[..., None]
        return output

    def named_parameters(self, **options: Any) -> Any:
        return self.inner.named_parameters(**options)


@pytest.mark.parametrize(("family", "seed"), GRID)
def test_agrees(family: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = sampled.draw(family, seed)
    if sample.settings.get("layer_norm_elementwise_affine") is False:  # its first values fail there
        base = transformers.models.opt.modeling_opt.OPTPreTrainedModel
        monkeypatch.setattr(base, "_init_weights", lambda self, module: None)
    if family == "bloom":  # its class writes the root of 2/pi with the eight digits that float32 has
        whole = partial(nn.functional.gelu, approximate="tanh")
        monkeypatch.setattr(transformers.models.bloom.modeling_bloom, "bloom_gelu_forward", whole)
    hf = made(sample, seed)
    case = parity.imported(hf, tmp_path / "in")
    assert case.bundle.provenance["family"] == family
    pad = sample.settings["pad_token_id"]
    if sample.cls == "ElectraForPreTraining":
        case.hf = OneColumn(hf)
    kind = case.bundle.config.structure
    check = {"encoder": encoder, "decoder": decoder, "encoder-decoder": encoder_decoder}[kind]
    check(case, family, sample, pad)
    case.hf = hf
    parity.round_trip(case, tmp_path / "out", type(hf), **sample.options)


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=() if f in ("llama", "mt5", "bart") else pytest.mark.long) for f in sampled.ALL],
)
def test_keys_left_out_are_those_of_the_class(family: str, tmp_path: Path) -> None:
    """Also token ids, and also where no generation_config.json says them."""
    sample = sampled.draw(family, 0)
    size = re.compile("size|_dim|width|layer|head|max_position|n_|d_|buckets|distance|num_|vocab|rotary_pct")
    other = re.compile("norm|token|original")
    chosen = {k: v for k, v in sample.settings.items() if size.search(k) and not other.search(k)}
    if family == "mt5":
        del chosen["num_decoder_layers"]
    if family == "marian":  # its own id has to be in the table
        chosen["pad_token_id"] = 0
    config = getattr(transformers, sample.config)(**chosen)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ids beyond the small table
        hf = scattered(getattr(transformers, sample.cls)(config, **sample.options), 0)
    whole = load(parity.saved(hf, tmp_path / "in"))
    (tmp_path / "in" / "generation_config.json").unlink(missing_ok=True)
    path = tmp_path / "in" / "config.json"
    written, own = json.loads(path.read_text()), getattr(transformers, sample.config)().to_dict()
    kept = {k: v for k, v in written.items() if k in ("model_type", "vocab_size") or v != own.get(k)}
    assert len(kept) < len(written) - 5
    path.write_text(json.dumps(kept))
    bare = load(tmp_path / "in")
    assert bare.config == whole.config
    assert bare.protocol == whole.protocol


def test_in_float32_blooms_constant_is_the_whole_one() -> None:
    """So that nothing but float64 can tell its class from ours."""
    x = torch.linspace(-4.0, 4.0, 97, dtype=torch.float64)
    theirs = transformers.models.bloom.modeling_bloom.bloom_gelu_forward
    written = x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))
    assert torch.equal(theirs(x), written)
    assert torch.tensor(0.79788456, dtype=torch.float32) == torch.tensor(2 / torch.pi).sqrt()
    assert parity.TOLERANCE < (written - nn.functional.gelu(x, approximate="tanh")).abs().max() * 10 < 1e-7
