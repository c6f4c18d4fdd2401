"""Record what a module computes: every operation, below any coding style (R39, R41).

A `Recording` is the dataflow of one forward pass at the level of PyTorch's operators: matrix products,
softmax, norms, activations, sums, views. Whether a step was a module, a function or an operator in a line of
its own makes no difference, and fused attention calls appear with their arguments. Each node knows the module
that was running and the source line that asked for it.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from isoform.errors import DataError, IsoformError, ShapeError
from isoform.verify.inner_padding import real_tokens
from isoform.verify.recorder import Recorder
from isoform.verify.recording import Node, Recording, Ref
from isoform.verify.spool import IN_MEMORY
from isoform.verify.subject import Inputs, Subject, main_tensor, mode
from isoform.verify.watching import running

__all__ = ["Node", "Recording", "Ref", "record", "recorded"]


def record(
    module: nn.Module, inputs: Inputs, path: str | Path | None = None, *, in_memory: int = IN_MEMORY
) -> Recording:
    """Run a module in evaluation mode and keep what it computes.

    Args:
        module: any module; its weights and mode are left as they were.
        inputs: as for `isoform.verify.audit`.
        path: also write the recording there.
        in_memory: bytes of activations to keep in memory. What a pass makes beyond them is written to a
            temporary file at once and mapped from there when it is looked at. Default: 512 MiB. Values on
            another device than the CPU stay on it.

    Returns:
        The recording. An operation in place is recorded as a new node; the old value is kept by a copy.
    """
    subject = Subject(module, inputs)
    subject.kwargs = subject.given()
    with mode(module, training=False):
        recording = _run(subject, in_memory)
    if path is not None:
        recording.save(path)
    return recording


def recorded(model: nn.Module | Recording, inputs: Inputs | None, role: str, in_memory: int) -> Recording:
    """What one of two models computes; a recording is taken as it is.

    Raises:
        DataError: a module without inputs.
        IsoformError: as `record`; the message says which of the two it is.
    """
    if isinstance(model, Recording):
        return model
    name = f"the {role}, {type(model).__name__}"
    if inputs is None:
        raise DataError(f"{name}: no inputs given; expected those of its forward")
    try:
        return record(model, inputs, in_memory=in_memory)
    except IsoformError as error:
        raise type(error)(f"{name}: {error}") from error


def _run(subject: Subject, in_memory: int) -> Recording:
    for stream in subject.streams:
        if 0 in (shape := subject.content(stream).shape):
            raise ShapeError(f"{stream.name} is {list(shape)}: expected at least one row and one position")
    recorder = Recorder(subject, in_memory)
    # Under autograd PyTorch takes its ordinary paths; without it, fused ones that hide the steps.
    with _plain_paths(), torch.enable_grad(), _nothing_saved(), recorder.modules(), recorder:
        result = _called(subject)
    output = recorder.ref(main_tensor(result))
    mapped = recorder.finish()
    reals: dict[str, str] = {}
    contents: dict[str, str] = {}
    roles = _roles(subject, main_tensor(result))
    for stream, role in zip(subject.streams, roles, strict=True):
        name = f"{role}: real"
        recorder.inputs[name] = real_tokens(subject, stream)
        reals[role] = name
        ids = f"{stream.name}.ids"
        contents[role] = ids if ids in recorder.inputs else stream.name
    names = subject.module.named_parameters(remove_duplicate=False)
    groups: dict[int, list[str]] = {}
    for name, parameter in names:
        groups.setdefault(id(parameter), []).append(name)
    return Recording(
        subject=type(subject.module).__name__,
        nodes=recorder.nodes,
        parameters=recorder.parameters,
        ties=[tuple(names) for names in groups.values() if len(names) > 1],
        inputs=recorder.inputs,
        constants=recorder.constants,
        output=output,
        reals=reals,
        contents=contents,
        trained=frozenset(name for name, _ in subject.module.named_parameters()),
        mapped=mapped,
    )


def _called(subject: Subject) -> Any:
    with running(subject.module):
        return subject.module(**{name: _entered(value) for name, value in subject.kwargs.items()})


def _roles(subject: Subject, result: Tensor) -> list[str]:
    """Which stream is the target: by names, unless the result has the positions of the other one alone."""
    roles = [str(stream.role) for stream in subject.streams]
    sizes = [subject.content(stream).shape[:2] for stream in subject.streams]
    fits = [result.dim() > 2 and size in (result.shape[:2], result.shape[:2][::-1]) for size in sizes]
    if len(roles) == 2 and fits.count(True) == 1 and roles[fits.index(True)] == "source":
        return roles[::-1]
    return roles


@contextmanager
def _plain_paths() -> Generator[None]:
    """Attention as products and softmax, not as one kernel."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _nothing_saved() -> saved_tensors_hooks:
    """There will be no backward pass, so nothing has to live until then."""

    def unpack(_: Any) -> Tensor:
        raise RuntimeError("a pass that is being recorded has no derivatives")

    return saved_tensors_hooks(lambda _: None, unpack)


def _entered(value: Any) -> Any:
    # Vectors that come from outside get a node of their own, so that others can be put in their place.
    vectors = isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 2
    return value.clone() if vectors else value
