"""The network, one idea a file."""

from isoform.nn.attention import Attention
from isoform.nn.cache import Cache, LayerCache
from isoform.nn.capture import capture
from isoform.nn.heads import pool
from isoform.nn.model import Output, Transformer, build
from isoform.nn.reading import Reading
from isoform.nn.stack import Memory, Stack

__all__ = [
    "Attention",
    "Cache",
    "LayerCache",
    "Memory",
    "Output",
    "Reading",
    "Stack",
    "Transformer",
    "build",
    "capture",
    "pool",
]
