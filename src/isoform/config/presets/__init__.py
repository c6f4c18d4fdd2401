"""Named configurations: the chapter's two, and one for each family; each an ordinary `ModelConfig`.

A preset is a starting point, not a mode: whatever it sets is written out in the value it returns.
"""

from __future__ import annotations

from collections.abc import Callable

from isoform.config.model import ModelConfig
from isoform.config.presets.chapter import original, pre_ln, torch_nn
from isoform.config.presets.decoders import bloom, falcon, gpt2, gpt_neox, opt, phi, starcoder2
from isoform.config.presets.encoder_decoders import bart, m2m100, marian, mbart, pegasus, t5
from isoform.config.presets.encoders import albert, bert, distilbert, electra, roberta
from isoform.config.presets.gemmas import gemma, gemma2, gemma3
from isoform.config.presets.llama_like import (
    llama,
    llama3,
    mistral,
    mixtral,
    olmo2,
    qwen2,
    qwen3,
    qwen3_moe,
)

PRESETS: dict[str, Callable[..., ModelConfig]] = {
    function.__name__: function
    for function in (
        original, pre_ln, torch_nn,
        bert, roberta, distilbert, albert, electra,
        gpt2, gpt_neox, opt, bloom, falcon, phi, starcoder2,
        llama, llama3, mistral, mixtral, qwen2, qwen3, qwen3_moe, gemma, gemma2, gemma3, olmo2,
        t5, bart, mbart, pegasus, m2m100, marian,
    )
}  # fmt: skip

__all__ = [
    "PRESETS",
    "albert",
    "bart",
    "bert",
    "bloom",
    "distilbert",
    "electra",
    "falcon",
    "gemma",
    "gemma2",
    "gemma3",
    "gpt2",
    "gpt_neox",
    "llama",
    "llama3",
    "m2m100",
    "marian",
    "mbart",
    "mistral",
    "mixtral",
    "olmo2",
    "opt",
    "original",
    "pegasus",
    "phi",
    "pre_ln",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "roberta",
    "starcoder2",
    "t5",
    "torch_nn",
]
