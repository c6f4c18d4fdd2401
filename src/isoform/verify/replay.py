"""Run a part of a recording again with other values at some of its nodes.

This is how one model's segment is fed the other's activations, so that one fault does not hide the next: the
recorded operators themselves are executed, whatever the code that once called them looked like.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from isoform.errors import DataError
from isoform.verify.record import Recording, Ref


def replay(
    recording: Recording,
    target: int,
    values: Mapping[int, Tensor],
    parameters: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """The value of node ``target`` when other nodes have the given values.

    Args:
        recording: made in this process; one read from a file holds no operators to run.
        target: number of the node.
        values: node number → the value it shall have. Nodes that do not depend on one of them keep theirs.
        parameters: other values for parameters.

    Raises:
        DataError: the recording cannot be run again.
    """
    done: dict[int, Tensor] = dict(values)
    changed = set(values)
    touched = {} if parameters is None else parameters
    needed = _between(recording, target, changed, touched)
    with torch.no_grad():
        for number in needed:
            if number not in done:
                done[number] = _run(recording, number, done, touched)
    return done.get(target, recording.nodes[target].value)


def _between(
    recording: Recording, target: int, changed: set[int], parameters: Mapping[str, Tensor]
) -> list[int]:
    """Nodes that lead to the target and depend on something changed, in order."""
    ancestors: set[int] = set()
    stack = [target]
    while stack:
        number = stack.pop()
        if number in ancestors:
            continue
        ancestors.add(number)
        if number not in changed:
            stack += [int(r.name) for r in recording.nodes[number].refs() if r.kind == "node"]
    dependent: set[int] = set(changed)
    for number in sorted(ancestors):
        for ref in recording.nodes[number].refs():
            hit = ref.kind == "node" and int(ref.name) in dependent
            if hit or (ref.kind == "parameter" and ref.name in parameters):
                dependent.add(number)
    return sorted(ancestors & dependent)


def _run(
    recording: Recording, number: int, done: Mapping[int, Tensor], parameters: Mapping[str, Tensor]
) -> Tensor:
    node = recording.nodes[number]
    if node.call is None:
        raise DataError("a recording that was read from a file cannot be run again; pass the module itself")

    def live(value: Any) -> Any:
        if isinstance(value, Ref):
            if value.kind == "node" and int(value.name) in done:
                return done[int(value.name)]
            if value.kind == "parameter" and value.name in parameters:
                return parameters[str(value.name)]
            return recording.value(value)
        if isinstance(value, list):
            return [live(item) for item in value]
        return value

    args = [live(a) for a in node.args]
    kwargs = {k: live(v) for k, v in node.kwargs.items() if k != "output"}
    if node.inplace and args:
        args[0] = args[0].clone()
    out = node.call(*args, **kwargs)
    if isinstance(out, tuple | list):
        out = [o for o in out if isinstance(o, Tensor)][node.kwargs.get("output", 0)]
    return out
