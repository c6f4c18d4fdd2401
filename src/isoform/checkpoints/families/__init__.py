"""The families of checkpoints that can be opened, each as data."""

from __future__ import annotations

from isoform.checkpoints.families import decoders, falcon, gemma, llama_like
from isoform.checkpoints.families.family import Family

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (*llama_like.FAMILIES, *gemma.FAMILIES, *decoders.FAMILIES, *falcon.FAMILIES)
}
