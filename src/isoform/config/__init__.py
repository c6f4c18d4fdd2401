"""Architecture as data: frozen, validated, serialisable."""

from isoform.config import presets
from isoform.config.base import Frozen, parse
from isoform.config.difference import Difference, difference
from isoform.config.files import dumps, read, schema, write
from isoform.config.model import (
    Embedding,
    Head,
    Layer,
    ModelConfig,
    Pooler,
    PoolingHead,
    Projection,
    SequenceHead,
    Stack,
    TaggingHead,
    TokenHead,
    Transform,
    Variant,
)
from isoform.config.parts import (
    ActivationName,
    Alibi,
    Attention,
    AttentionBias,
    DynamicNtkScaling,
    Experts,
    FeedForward,
    Gated,
    Learned,
    LinearScaling,
    Llama3Scaling,
    NoPositions,
    Norm,
    NoScaling,
    QKNorm,
    RelativeBuckets,
    Rotary,
    Sinusoidal,
    TwoLayer,
    YarnScaling,
)

__all__ = [
    name for name in dir() if not name.startswith("_") and name not in ("base", "files", "model", "parts")
]
