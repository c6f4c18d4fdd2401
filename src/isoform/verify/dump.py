"""Activations that another framework wrote down: named arrays, held against a recording (R39).

A dump is one ``.safetensors`` or ``.npz`` file (as ``numpy.savez`` writes it) of arrays by
any names. Each floating-point array is one activation of one pass, in any of these layouts:
``[batch, time, features]``, ``[time, batch, features]``, ``[batch · time, features]``, or by heads
``[batch, heads, time, width]`` and ``[batch, time, heads, width]``. An array named ``logits``, ``output``,
``result`` or ``last_hidden_state`` is the result. Arrays of integers under the name of an input
(``input_ids``) are held against that input: two passes over other data are not two functions.
Arrays are aligned by what is in them; where nothing in the recording is like an array, its name decides if it
ends in a module's path.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from isoform.errors import DataError
from isoform.verify.align import Model
from isoform.verify.comparison import Comparison, Row
from isoform.verify.diagnose.case import layer_of
from isoform.verify.measure import coarsest, perturbed, relative, rounding, verdict

RESULTS = ("logits", "output", "result", "last_hidden_state")
SAMPLE = 512
UNLIKE = 0.5
"""A relative difference above this says that two arrays have nothing to do with each other."""


@dataclasses.dataclass(frozen=True, eq=False)
class Dump:
    """Named arrays of one pass.

    Args:
        subject: where they come from.
        arrays: by name.
    """

    subject: str
    arrays: dict[str, Tensor]


def read_dump(path: str | Path) -> Dump:
    """Read a ``.safetensors`` or ``.npz`` file of named arrays.

    Raises:
        DataError: no such file, another format, or no floating-point array in it.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(path)
    try:
        arrays = _npz(path) if path.suffix == ".npz" else load_file(path)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (SafetensorError, ValueError, TypeError, OSError, EOFError) as error:
        text = " ".join(str(error).split())[:120]
        raise DataError(f"{path}: not a .safetensors or .npz file of named arrays: {text}") from None
    if not any(a.is_floating_point() for a in arrays.values()):
        raise DataError(f"{path}: holds no floating-point array; expected activations by name")
    return Dump(path.name, arrays)


def _npz(path: Path) -> dict[str, Tensor]:
    import zipfile

    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: torch.from_numpy(file[name]) for name in file.files}
    except (zipfile.BadZipFile, AttributeError) as error:
        raise ValueError(str(error)) from None


def compare_dump(model: Model, dump: Dump, *, reference: bool) -> Comparison:
    """Hold a dump against a recorded model.

    Args:
        model: recorded on the same data.
        dump: the arrays; differences are relative to the model's values.
        reference: the dump is the reference, the model the candidate.
    """
    graph = model.graph
    floats = {name: array for name, array in dump.arrays.items() if array.is_floating_point()}
    eps = max([coarsest(model), *(torch.finfo(a.dtype).eps for a in floats.values())])
    nodes = [n for n in sorted(graph.useful) if graph.live[n] and graph.values[n].is_floating_point()]
    found = {name: _counterpart(model, nodes, name, array) for name, array in floats.items()}
    ordered: list[Row] = []
    for node, again in perturbed(model, {hit[0] for hit in found.values() if hit is not None}, eps):
        expected = rounding(model, node, model.width(node), again, eps)
        for name, hit in found.items():
            if hit is not None and hit[0] == node:
                ends = node == graph.output or _is_result(name)
                paths = (name, graph.place(node)[0]) if reference else (graph.place(node)[0], name)
                label = "result" if ends else graph.nodes[node].op
                shape = tuple(floats[name].shape)
                ordered.append(Row(label, layer_of(model, node), *paths, hit[1], expected, shape))
        model.recording.release()
    subjects = (dump.subject, model.name) if reference else (model.name, dump.subject)
    notes = [*_other_data(model, dump), *(f"{n}: no counterpart" for n, hit in found.items() if hit is None)]
    ends = [row for row in ordered if row.name == "result"]
    if not ends:
        notes.append(f"the dump holds no result; expected an array named {', '.join(RESULTS)}")
    # Without a result the places on the way are all there is to judge by.
    judged = ordered if ends else [dataclasses.replace(row, name="result") for row in ordered]
    return Comparison(*subjects, verdict(judged, eps), tuple(ordered), {}, tuple(notes))


def _is_result(name: str) -> bool:
    return name.replace("/", ".").split(".")[-1] in RESULTS


def _counterpart(model: Model, nodes: list[int], name: str, array: Tensor) -> tuple[int, float] | None:
    """The operation that an array is the value of, and how far it is off."""
    graph, best = model.graph, list[tuple[float, int, int]]()
    fitting = [graph.output] if _is_result(name) else nodes
    for node in fitting:
        value = graph.values[node]
        for form, seen in enumerate(_readings(array, value)):
            sample = _sample(value), _sample(seen)
            size = float(sample[0].abs().max().clamp(min=1e-30))
            best.append((float((sample[0] - sample[1]).abs().max()) / size, node, form))
    if not best:
        return None
    best.sort()
    exact = [(_error(model, node, array, form), node) for _, node, form in best[:4]]
    error, node = min(exact)
    if error > UNLIKE and not _is_result(name):
        path = name.replace("/", ".")
        named = [n for _, n, _ in best if graph.nodes[n].module and path.endswith(graph.nodes[n].module)]
        if not named:
            return None
        node = max(named)  # what a module gives comes last in it
        return node, min(_error(model, node, array, form) for _, n, form in best if n == node)
    return node, error


def _readings(array: Tensor, value: Tensor) -> Iterator[Tensor]:
    """An array in the shape of a value: as it is, or with batch and time, or heads and time, exchanged."""
    if array.numel() != value.numel() or array.dim() < 2:
        return
    for axes in ((0, 0), (0, 1), (1, 2)):
        if array.dim() > axes[1] + 1 or axes == (0, 0):
            turned = array.transpose(*axes)
            if turned.shape == value.shape or (value.dim() <= 3 and _ends(turned, value)):
                yield turned.reshape(value.shape)


def _ends(array: Tensor, value: Tensor) -> bool:
    """Whether leading axes, or the last two, are only written apart."""
    merged = array.shape[-2] * array.shape[-1] if array.dim() == 4 else 0
    return value.shape[-1] in (array.shape[-1], merged)


def _sample(value: Tensor) -> Tensor:
    flat = value.reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)].double().nan_to_num()


def _error(model: Model, node: int, array: Tensor, form: int) -> float:
    width, value = model.width(node), model.graph.values[node]
    seen = next(itertools.islice(_readings(array, value), form, None))
    x, y = (model.graph.canonical(v, width, node) for v in (value, seen))
    if x is None or y is None:
        x, y = value, seen
    return relative(x, y, model.real(model.role(node)))


def _other_data(model: Model, dump: Dump) -> list[str]:
    notes: list[str] = []
    for name, ours in model.recording.inputs.items():
        theirs = dump.arrays.get(name)
        if theirs is None or theirs.is_floating_point() or ours.is_floating_point():
            continue
        if ours.shape == theirs.t().shape != theirs.shape:
            theirs = theirs.t()
        if ours.shape != theirs.shape or not torch.equal(ours.long(), theirs.long()):
            notes.append(f"{name} is not the same in both: not the same data")
    return notes
