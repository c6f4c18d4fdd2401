"""BART and its relatives, and T5, agree with transformers."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from isoform.tokens import Tokens

transformers = pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))
parity = importlib.import_module("parity")

BART = {
    "vocab_size": 61, "d_model": 24, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 3,
    "decoder_attention_heads": 6, "encoder_ffn_dim": 20, "decoder_ffn_dim": 28, "max_position_embeddings": 40,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}  # fmt: skip
T5 = {
    "vocab_size": 61, "d_model": 24, "d_kv": 5, "d_ff": 20, "num_layers": 2, "num_decoder_layers": 3,
    "num_heads": 3, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12,
    "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0,
}  # fmt: skip
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bart": ("BartConfig", "BartForConditionalGeneration", BART),
    "bart-scaled-relu": (
        "BartConfig", "BartForConditionalGeneration",
        {**BART, "scale_embedding": True, "activation_function": "relu", "tie_word_embeddings": False},
    ),
    "mbart": ("MBartConfig", "MBartForConditionalGeneration", {**BART, "scale_embedding": True}),
    "pegasus": ("PegasusConfig", "PegasusForConditionalGeneration", {**BART, "activation_function": "relu"}),
    "marian": (
        "MarianConfig", "MarianMTModel", {**BART, "activation_function": "swish", "scale_embedding": True},
    ),
    "marian-two-vocabularies": (
        "MarianConfig", "MarianMTModel",
        {**BART, "share_encoder_decoder_embeddings": False, "decoder_vocab_size": 61,
         "tie_word_embeddings": False},
    ),
    "m2m100": ("M2M100Config", "M2M100ForConditionalGeneration", BART),
    "t5": ("T5Config", "T5ForConditionalGeneration", T5),
    "t5-1.1": (
        "T5Config", "T5ForConditionalGeneration",
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "layer_norm_epsilon": 1e-2},
    ),
    "t5-gated-silu": ("T5Config", "T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-silu"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_agrees(name: str, tmp_path: Path) -> None:
    config_name, cls_name, settings = CASES[name]
    config = getattr(transformers, config_name)(**settings)
    config._attn_implementation = "eager"
    cls = getattr(transformers, cls_name)
    torch.manual_seed(0)
    hf = parity.perturb(cls(config))
    case = parity.imported(hf, tmp_path / "in")
    source = parity.ragged(53, (13, 4, 9), "right", seed=3)
    target = parity.ragged(53, (17, 9, 3), "right", seed=4)
    theirs = {
        "input_ids": source.ids, "attention_mask": source.real_or_ones().long(),
        "decoder_input_ids": target.ids, "decoder_attention_mask": target.real_or_ones().long(),
    }  # fmt: skip
    parity.compare_outputs(case, target, theirs, source)
    parity.round_trip(case, tmp_path / "out", cls)
    left = source.padded("left")
    assert isinstance(left, Tokens)
    with torch.no_grad():
        right = case.bundle.model(target, source).logits
        parity.close(case.bundle.model(target, left).logits, right, "padding side", 1e-12)
