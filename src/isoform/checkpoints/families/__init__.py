"""The families of checkpoints that can be opened, each as data."""

from __future__ import annotations

from isoform.checkpoints.families import (
    albert,
    bloom,
    distilbert,
    encoders,
    fairseq,
    falcon,
    gemma,
    gpt2,
    gpt_neox,
    llama,
    opt,
    phi,
    starcoder2,
    t5,
)
from isoform.checkpoints.families.family import Family

_MODULES = (
    llama, gemma, gpt2, gpt_neox, opt, bloom, falcon, phi, starcoder2, fairseq, t5, encoders, albert,
    distilbert,
)  # fmt: skip
FAMILIES: dict[str, Family] = {family.model_type: family for module in _MODULES for family in module.FAMILIES}
