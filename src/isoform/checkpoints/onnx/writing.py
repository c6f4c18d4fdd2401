"""ONNX folders: graphs, a table of their inputs and outputs, the token protocol, the vocabularies."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isoform.checkpoints.artifact import write_tokenizers
from isoform.checkpoints.bundle import Bundle
from isoform.checkpoints.checked import Checked
from isoform.checkpoints.extras import need
from isoform.checkpoints.onnx.graphs import TOTAL, Graph, Port, graphs
from isoform.checkpoints.onnx.runtime import check
from isoform.config.files import write_text
from isoform.config.folders import replaced
from isoform.errors import ArtifactError
from isoform.nn import Attention, Transformer
from isoform.nn.attention import Backend

OPSET = 20
MARK = "isoform_onnx.json"
# Sizes of the traced example: all different, and none that a trace would take for a constant.
EXAMPLE = {"batch": 3, "length": 5, "past": 4, "total": 9, "source": 6}


def export(bundle: Bundle, folder: Path) -> Path:
    """Write a network as ONNX, any batch and length, and check it with onnxruntime.

    An encoder and a decoder become ``model.onnx``, an encoder–decoder ``encoder.onnx`` and ``decoder.onnx``.
    Decoders take ``past.N.key`` and ``past.N.value``, empty before a prompt, and return ``present.N.…``, one
    slot longer for every token; ``attention_mask`` covers all slots. The encoder of an encoder–decoder
    returns the keys and values that each decoder layer reads, so that they are computed once a source.

    Args:
        bundle: what to write, in float32.
        folder: where; replaced whole if it is an earlier export.

    Raises:
        ArtifactError: the libraries are missing, another floating type, or a part that cannot be traced.
        CheckError: onnxruntime computes another function.
    """
    library = need("onnx", "onnx", "the onnx format")
    need("onnxscript", "onnx", "the onnx format")
    runtime = need("onnxruntime", "onnx", "the onnx format")
    model = bundle.model
    kind = next(model.parameters()).dtype
    if kind != torch.float32:
        raise ArtifactError(f"the onnx format is written in float32, not {kind}: convert the bundle first")
    with replaced(folder, mark=MARK) as new:
        written = [_write(library, model, graph, new) for graph in graphs(model)]
        state = {
            "protocol": bundle.protocol.model_dump(mode="json"),
            "vocabularies": write_tokenizers(bundle, new),
            "graphs": written,
        }
        write_text(new / MARK, json.dumps(state, indent=1, ensure_ascii=False) + "\n")
        Checked(None, check(runtime, bundle, new)).write(new)
    return folder


def _write(library: Any, model: Transformer, graph: Graph, folder: Path) -> dict[str, Any]:
    """Trace one graph and save it; what it takes and gives."""
    path = folder / graph.file
    dims = {name: torch.export.Dim(name, min=0, max=_longest(model, name)) for name in EXAMPLE}
    arguments = _arguments(graph, [_example(port) for port in graph.inputs])
    shapes = _arguments(graph, [_free(port, dims) for port in graph.inputs])
    backends: dict[Attention, Backend] = {m: m.backend for m in model.modules() if isinstance(m, Attention)}
    training = model.training
    model.eval().set_attention("eager")
    try:
        with torch.no_grad(), _silence():
            program = torch.onnx.export(
                graph.module.eval(), (), kwargs=arguments, dynamic_shapes=shapes, dynamo=True,
                input_names=[port.name for port in graph.inputs],
                output_names=[port.name for port in graph.outputs],
                opset_version=OPSET, verbose=False,
            )  # fmt: skip
            assert program is not None
            program.save(str(path))
    except Exception as error:  # tracers raise whatever they stumble upon
        reason = " ".join(str(error).split())[:300]
        raise ArtifactError(f"the onnx format: {graph.file} cannot be traced: {reason}") from error
    finally:
        model.train(training)
        for module, backend in backends.items():
            module.backend = backend
    library.checker.check_model(str(path))
    return {
        "file": graph.file,
        "inputs": [dataclasses.asdict(port) for port in graph.inputs],
        "outputs": [dataclasses.asdict(port) for port in graph.outputs],
    }


@contextlib.contextmanager
def _silence() -> Generator[None]:
    """Tracing tells of libraries that are not there and of its own steps."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _longest(model: Transformer, name: str) -> int:
    longest = model.config.max_positions()
    return 2**20 if longest is None or name == "batch" else longest


def _example(port: Port) -> Tensor:
    shape = [EXAMPLE[axis] if isinstance(axis, str) else axis for axis in port.axes]
    if port.dtype == "float":
        return torch.zeros(shape)
    if "mask" in port.name:
        ones = torch.ones(shape, dtype=torch.long)
        ones[1, 0] = 0  # padding, so that nothing about it is taken for granted
        return ones
    return torch.ones(shape, dtype=torch.long)


def _free(port: Port, dims: dict[str, Any]) -> dict[int, Any]:
    """The dimensions of one input that may take any size."""
    free = {axis: dims[name] for axis, name in enumerate(port.axes) if isinstance(name, str)}
    if TOTAL in port.axes:
        free[port.axes.index(TOTAL)] = torch.export.Dim.AUTO
    return free


def _arguments(graph: Graph, values: list[Any]) -> dict[str, Any]:
    """Values by argument: those of numbered inputs as one list."""
    result: dict[str, Any] = {}
    for port, value in zip(graph.inputs, values, strict=True):
        name, _, rest = port.name.partition(".")
        if rest:
            result.setdefault(name, []).append(value)
        else:
            result[name] = value
    return result
