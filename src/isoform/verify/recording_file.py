"""Recordings on disk: one safetensors file.

Every value is there under ``node.N``, ``parameter.NAME``, ``input.NAME`` or ``constant.N``, except those that
are views of another one: they are kept as a place in it. The dataflow is JSON in the metadata, under
``isoform.recording``: for each node its operator, arguments (``{"ref": [kind, name, index]}`` for tensors),
module and source line. Nothing in the file is code, and nothing of it depends on the machine that wrote it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isoform.config.temporary import temporary
from isoform.errors import DataError
from isoform.verify.recording import Node, Recording, Ref, flattened, geometry, owns, rewritten, seen_through

FORMAT = 2


def save(recording: Recording, path: str | Path) -> None:
    """Write a recording under a temporary name, flush it and rename it into place.

    Values are written from where they are, one after another: no second copy of them is made in memory.
    """
    from safetensors.torch import save_file

    tensors, views = _laid_out(
        {f"node.{n.number}": n.value for n in recording.nodes}
        | {f"parameter.{k}": v for k, v in recording.parameters.items()}
        | {f"input.{k}": v for k, v in recording.inputs.items()}
        | {f"constant.{k}": v for k, v in recording.constants.items()}
    )
    flow = {
        "format": FORMAT,
        "views": views,
        "reals": recording.reals,
        "contents": recording.contents,
        "trained": sorted(recording.trained),
        "subject": recording.subject,
        "ties": recording.ties,
        "output": dataclasses.astuple(recording.output),
        "nodes": [
            [n.op, _plain(n.args), _plain(n.kwargs), n.module, n.source, _name(n.call), n.inplace]
            for n in recording.nodes
        ],
    }
    path = Path(path)
    with temporary(path) as new:
        save_file(tensors, new, {"isoform.recording": json.dumps(flow)})
        with new.open("rb+") as file:
            os.fsync(file.fileno())
        new.replace(path)


def load(path: str | Path) -> Recording:
    """Read a recording; tensors stay in the file until they are looked at.

    Raises:
        DataError: no such file, or not a recording.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            flow = json.loads((file.metadata() or {})["isoform.recording"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if flow["format"] != FORMAT:
            raise DataError(f"{path}: a recording of format {flow['format']}; this version reads {FORMAT}")
        return _built(flow, tensors)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (SafetensorError, KeyError, ValueError, TypeError, IndexError, RuntimeError, OSError):
        raise DataError(f"{path}: not a recording; expected what isoform.verify.record writes") from None


def _laid_out(values: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What is written, and the places of what is a view of it."""
    owners: dict[int, str] = {}
    for name, value in values.items():
        if value.numel() and owns(value):
            owners.setdefault(value.untyped_storage().data_ptr(), name)
    tensors: dict[str, Tensor] = {}
    views: dict[str, Any] = {}
    for name, value in values.items():
        owner = owners.get(value.untyped_storage().data_ptr()) if value.numel() else None
        if owner is None or value.is_conj() or value.is_neg():
            owner, value = name, value.detach().resolve_conj().resolve_neg()
            value = value if owns(value) else value.clone(memory_format=torch.contiguous_format)
        plain = value.is_contiguous() and not value.is_complex()
        if owner == name:
            content = value.detach() if plain else flattened(value.detach())
            # The format has no complex numbers of double width.
            tensors[name] = torch.view_as_real(content) if value.is_complex() else content
        if owner != name or not plain:
            views[name] = [owner, str(value.dtype).removeprefix("torch."), *geometry(value)]
    return tensors, views


def _built(flow: dict[str, Any], tensors: dict[str, Tensor]) -> Recording:
    for name, (owner, dtype, *place) in flow["views"].items():
        if owner != name:
            tensors[name] = seen_through(tensors[owner].view(-1), getattr(torch, dtype), tuple(place))
    for name, (owner, dtype, *place) in flow["views"].items():
        if owner == name:
            tensors[name] = seen_through(tensors[owner].view(-1), getattr(torch, dtype), tuple(place))
    named: dict[str, dict[str, Tensor]] = {"node": {}, "parameter": {}, "input": {}, "constant": {}}
    for name, value in tensors.items():
        kind, rest = name.split(".", 1)
        named[kind][rest] = value
    nodes = [
        Node(
            i, op, tuple(_live(args)), _live(kwargs), named["node"][str(i)], module, source, _call(call), over
        )
        for i, (op, args, kwargs, module, source, call, over) in enumerate(flow["nodes"])
    ]
    return Recording(
        flow["subject"],
        nodes,
        named["parameter"],
        [tuple(group) for group in flow["ties"]],
        named["input"],
        {int(k): v for k, v in named["constant"].items()},
        Ref(*flow["output"]),
        flow["reals"],
        flow["contents"],
        frozenset(flow["trained"]),
    )


def _name(call: Callable[..., Any] | None) -> str:
    return "rewritten" if call is rewritten else str(call)


def _call(name: str) -> Callable[..., Any] | None:
    """The operator of a name such as ``aten.addmm.default``."""
    if name == "rewritten":
        return rewritten
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return {"torch": str(value).removeprefix("torch."), "kind": type(value).__name__}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, Ref):
        return {"ref": dataclasses.astuple(value)}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _live(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"ref"}:
        return Ref(*value["ref"])
    if isinstance(value, dict) and set(value) == {"float"}:
        return float(value["float"])
    if isinstance(value, dict) and set(value) == {"torch", "kind"}:
        return torch.device(value["torch"]) if value["kind"] == "device" else getattr(torch, value["torch"])
    if isinstance(value, list):
        return [_live(item) for item in value]
    if isinstance(value, dict):
        return {k: _live(v) for k, v in value.items()}
    return value
