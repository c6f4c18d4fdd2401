"""What the family grids leave out: dynamic frequencies, classifiers of decoders, greedy tokens, bfloat16."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from isoform.generation import generate
from isoform.tokens import Tokens

transformers = pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))
parity = importlib.import_module("parity")

LLAMA = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 64, "head_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT2 = {"vocab_size": 61, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 64, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip


def make(config: str, cls: str, settings: dict[str, Any], folder: Path) -> Any:
    made = getattr(transformers, config)(**settings)
    made._attn_implementation = "eager"
    torch.manual_seed(0)
    return parity.imported(parity.perturb(getattr(transformers, cls)(made)), folder)


def test_dynamic_frequencies_row_by_row(tmp_path: Path) -> None:
    """The library scales by the longest row of a batch, so each row is compared alone."""
    scaled = {**LLAMA, "max_position_embeddings": 8, "rope_scaling": {"rope_type": "dynamic", "factor": 3.0}}
    case = make("LlamaConfig", "LlamaForCausalLM", scaled, tmp_path / "in")
    for n in (5, 8, 9, 21, 6):
        tokens = parity.ragged(61, (n,), "right", seed=n)
        parity.compare_outputs(case, tokens, {"input_ids": tokens.ids}, gradients=False)
    # The library keeps the frequencies of the longest text so far until a short one comes.
    case.hf(torch.tensor([[3, 4]]))
    parity.round_trip(case, tmp_path / "out", type(case.hf))


@pytest.mark.parametrize(
    "changes",
    [
        {"max_position_embeddings": 9, "factor": 4.0},
        {"max_position_embeddings": 9, "factor": 4.0, "attention_factor": 1.3},
        {"max_position_embeddings": 36, "original_max_position_embeddings": 9, "factor": 2.0},
    ],
)
def test_longrope_row_by_row(changes: dict[str, Any], tmp_path: Path) -> None:
    """One list of divisors up to the original length, another beyond it."""
    inside = {name: value for name, value in changes.items() if name.endswith("factor")}
    beside = {name: value for name, value in changes.items() if name not in inside}
    lists = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.5, 3.0, 3.5]}
    table = {"rope_type": "longrope", **lists, **inside}
    case = make(
        "LlamaConfig", "LlamaForCausalLM", {**LLAMA, **beside, "rope_scaling": table}, tmp_path / "in"
    )
    for n in (5, 9, 10, 21, 6):
        tokens = parity.ragged(61, (n,), "right", seed=n)
        parity.compare_outputs(case, tokens, {"input_ids": tokens.ids}, gradients=False)
    ragged = parity.ragged(61, (21, 9, 3), "left")
    with torch.no_grad():  # each row by its own length
        together = case.bundle.model(ragged).logits
        alone = case.bundle.model(Tokens(ragged.ids[1:2, -9:])).logits
    parity.close(together[1:2, -9:], alone, "a row alone", 1e-12)
    case.hf(torch.tensor([[3, 4]]))
    parity.round_trip(case, tmp_path / "out", type(case.hf))


@pytest.mark.parametrize(
    ("config", "cls", "settings"),
    [
        ("LlamaConfig", "LlamaForSequenceClassification", {**LLAMA, "num_labels": 4}),
        ("GPT2Config", "GPT2ForSequenceClassification", {**GPT2, "num_labels": 3}),
        ("GPT2Config", "GPT2Model", GPT2),
        ("LlamaConfig", "LlamaModel", LLAMA),
    ],
)
def test_other_heads(config: str, cls: str, settings: dict[str, Any], tmp_path: Path) -> None:
    case = make(config, cls, settings, tmp_path / "in")
    name = "last_hidden_state" if cls.endswith("Model") else "logits"
    tokens = parity.ragged(61, (11, 6, 2), "right")
    parity.compare_outputs(case, tokens, parity.their_inputs(tokens, positions=True), name=name)
    parity.round_trip(case, tmp_path / "out", type(case.hf))


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_greedy_tokens(family: str, tmp_path: Path) -> None:
    t5 = {"vocab_size": 61, "d_model": 24, "d_kv": 5, "d_ff": 20, "num_layers": 2, "num_heads": 3,
          "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}  # fmt: skip
    config, cls, settings = {
        "llama": ("LlamaConfig", "LlamaForCausalLM", LLAMA),
        "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2),
        "t5": ("T5Config", "T5ForConditionalGeneration", t5),
    }[family]
    case = make(config, cls, settings, tmp_path / "in")
    prompt = parity.ragged(61, (9, 4, 6), "left")
    # As it is, the library's softmax in float32 makes NaN of rows that read nothing in float64.
    with parity.honest_float64():
        theirs = case.hf.generate(
            prompt.ids, attention_mask=prompt.real_or_ones().long(), max_new_tokens=12, do_sample=False
        )
    if family == "t5":
        start = Tokens(torch.zeros(3, 1, dtype=torch.long))
        ours = generate(
            case.bundle.model, start, source=prompt, max_new_tokens=12, protocol=case.bundle.protocol
        )
        new = theirs[:, 1:]
    else:
        ours = generate(case.bundle.model, prompt, max_new_tokens=12, protocol=case.bundle.protocol)
        new = theirs[:, prompt.length :]
    for mine, row in zip(ours.ids, new.tolist(), strict=True):
        ends = row.index(2) if 2 in row else len(row)
        assert mine == row[:ends]


def test_bfloat16_keeps_its_bits(tmp_path: Path) -> None:
    from isoform.checkpoints import export, load

    hf = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    parity.perturb(hf).to(torch.bfloat16).save_pretrained(tmp_path / "in")
    export(load(tmp_path / "in"), tmp_path / "out")
    back = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert back.dtype == torch.bfloat16
    for name, tensor in hf.state_dict().items():
        assert torch.equal(tensor, back.state_dict()[name]), name


def test_exported_tokenizer_cuts_alike(tmp_path: Path) -> None:
    from isoform.checkpoints import Bundle, export, load
    from isoform.config import presets
    from isoform.config.protocol import Protocol
    from isoform.data import Characters, Tokenizer
    from isoform.nn import build

    texts = ["hello wide world", "a few more letters"]
    vocabulary = Tokenizer.train(Characters(vocab_size=60), texts, where="here")
    cfg = presets.gpt2(60, d_model=12, n_heads=2, ffn_width=8, n_layers=1, max_positions=30)
    special = vocabulary.special
    assert special.eos is not None
    assert special.bos is not None
    assert special.pad is not None
    protocol = Protocol(pad_id=special.pad, eos_ids=(special.eos,), start=(special.bos,))
    bundle = Bundle(build(cfg, seed=0).eval(), cfg, vocabulary, None, protocol, {})
    export(bundle, tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    again = load(tmp_path / "out")
    assert again.tokenizer is not None
    assert again.protocol == protocol
    for text in texts:
        ids = vocabulary.encode(text)
        assert theirs(text)["input_ids"] == [special.bos, *ids]
        assert again.tokenizer.encode_with_template(text) == [special.bos, *ids]
