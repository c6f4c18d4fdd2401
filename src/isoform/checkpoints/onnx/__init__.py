"""ONNX out: graphs of any batch and length, with the cache as input and output, checked with onnxruntime."""

from __future__ import annotations

from isoform.checkpoints.onnx.writing import export

__all__ = ["export"]
