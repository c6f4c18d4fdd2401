"""The families of checkpoints that can be opened, each as data."""

from __future__ import annotations

from isoform.checkpoints.families import decoders, encoders, fairseq, falcon, gemma, llama_like, t5
from isoform.checkpoints.families.family import Family

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for module in (llama_like, gemma, decoders, falcon, fairseq, t5, encoders)
    for family in module.FAMILIES
}
