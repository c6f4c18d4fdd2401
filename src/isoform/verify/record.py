"""Record what a module computes: every operation, below any coding style (R39, R41).

A `Recording` is the dataflow of one forward pass at the level of PyTorch's operators: matrix products,
softmax, norms, activations, sums, views. Whether a step was a module, a function or an operator in a line of
its own makes no difference, and fused attention calls appear with their arguments. Each node knows the module
that was running and the source line that asked for it.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from isoform.errors import DataError
from isoform.verify.subject import Inputs, Subject, mode

# Operators that hand a tensor on without changing a value.
PLUMBING = frozenset(
    (
        "alias",
        "clone",
        "contiguous",
        "detach",
        "lift_fresh",
        "lift_fresh_copy",
        "_to_copy",
        "_unsafe_view",
        "_conj",
    )
)


Geometry = tuple[tuple[int, ...], tuple[int, ...], int]

# Further outputs of these are by-products that nothing in a forward pass reads.
_BY_PRODUCTS = frozenset(("native_layer_norm", "native_dropout", "native_batch_norm", "native_group_norm"))


@dataclasses.dataclass(frozen=True)
class Ref:
    """Where an argument came from: a node's output, a parameter or buffer, an input, or a constant."""

    kind: str  # "node" | "parameter" | "input" | "constant"
    name: str | int
    index: int = 0


@dataclasses.dataclass(eq=False)
class Node:
    """One operation.

    Attributes:
        number: its place in the order of execution.
        op: the operator's name without overload, e.g. ``"addmm"``.
        args: arguments in order; tensors as `Ref`, lists of them as lists, everything else as it is.
        kwargs: keyword arguments, likewise.
        value: the (first) output.
        module: dotted path of the innermost module that was running.
        source: file and line outside PyTorch that asked for it.
        call: the operator itself, to run it again; None in a recording that was read from a file.
        inplace: it wrote its result over its first argument.
    """

    number: int
    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Tensor
    module: str
    source: str
    call: Callable[..., Any] | None = None
    inplace: bool = False

    def refs(self) -> Iterator[Ref]:
        """Every tensor argument, in order."""
        yield from _refs(self.args)
        yield from _refs(tuple(self.kwargs.values()))


@dataclasses.dataclass(eq=False)
class Recording:
    """One forward pass.

    Attributes:
        subject: the module's class.
        nodes: all operations in order.
        parameters: parameters and buffers by name; tied ones under their first name.
        ties: names that are one tensor.
        inputs: tensors that came from outside, by argument name.
        constants: other tensors that were used, by number.
        output: the node that made the result.
        reals: for each role ("target", "source") the name of the recorded input that holds ``[B, T]`` True =
            a real token.
        trained: names of the parameters; the others are buffers.
        contents: for each role the name of the recorded input that holds the ids or vectors.
    """

    subject: str
    nodes: list[Node]
    parameters: dict[str, Tensor]
    ties: list[tuple[str, ...]]
    inputs: dict[str, Tensor]
    constants: dict[int, Tensor]
    output: Ref
    reals: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    contents: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    trained: frozenset[str] = frozenset()

    def value(self, ref: Ref) -> Tensor:
        """The tensor a reference stands for."""
        if ref.kind == "node":
            return self.nodes[int(ref.name)].value
        if ref.kind == "parameter":
            return self.parameters[str(ref.name)]
        return self.inputs[str(ref.name)] if ref.kind == "input" else self.constants[int(ref.name)]

    def result(self) -> Tensor:
        """The module's main output."""
        return self.value(self.output)

    def users(self) -> dict[int, list[int]]:
        """For each node the nodes that read its output."""
        users: dict[int, list[int]] = {node.number: [] for node in self.nodes}
        for node in self.nodes:
            for ref in node.refs():
                if ref.kind == "node" and node.number not in users[int(ref.name)]:
                    users[int(ref.name)].append(node.number)
        return users

    def save(self, path: str | Path) -> None:
        """Write it as one safetensors file, whole or not at all; the dataflow goes into its metadata."""
        from safetensors.torch import save

        from isoform.config.files import write_bytes

        tensors = {f"node.{n.number}": n.value for n in self.nodes}
        tensors |= {f"parameter.{k}": v for k, v in self.parameters.items()}
        tensors |= {f"input.{k}": v for k, v in self.inputs.items()}
        tensors |= {f"constant.{k}": v for k, v in self.constants.items()}
        flow = {
            "format": 1,
            "reals": self.reals,
            "contents": self.contents,
            "trained": sorted(self.trained),
            "subject": self.subject,
            "ties": self.ties,
            "output": dataclasses.astuple(self.output),
            "nodes": [
                [n.op, _plain(n.args), _plain(n.kwargs), n.module, n.source, _name(n.call), n.inplace]
                for n in self.nodes
            ],
        }
        flat = {name: value.detach().contiguous().clone() for name, value in tensors.items()}
        write_bytes(path, save(flat, {"isoform.recording": json.dumps(flow)}))

    @classmethod
    def load(cls, path: str | Path) -> Recording:
        """Read a recording; tensors are mapped from the file.

        Raises:
            DataError: no such file, or not a recording.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), "pt") as file:
                flow = json.loads((file.metadata() or {})["isoform.recording"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except FileNotFoundError:
            raise DataError(f"{path}: no such file") from None
        except (SafetensorError, KeyError, ValueError):
            raise DataError(f"{path}: not a recording; expected what isoform.verify.record writes") from None
        named: dict[str, dict[str, Tensor]] = {"node": {}, "parameter": {}, "input": {}, "constant": {}}
        for name, value in tensors.items():
            kind, rest = name.split(".", 1)
            named[kind][rest] = value
        nodes = [
            Node(
                i,
                op,
                tuple(_live(args)),
                _live(kwargs),
                named["node"][str(i)],
                module,
                source,
                _call(call),
                inplace,
            )
            for i, (op, args, kwargs, module, source, call, inplace) in enumerate(flow["nodes"])
        ]
        constants = {int(k): v for k, v in named["constant"].items()}
        ties = [tuple(group) for group in flow["ties"]]
        return cls(
            flow["subject"],
            nodes,
            named["parameter"],
            ties,
            named["input"],
            constants,
            Ref(*flow["output"]),
            flow["reals"],
            flow["contents"],
            frozenset(flow["trained"]),
        )


def record(module: nn.Module, inputs: Inputs, path: str | Path | None = None) -> Recording:
    """Run a module in evaluation mode and keep what it computes.

    Args:
        module: any module; its weights and mode are left as they were.
        inputs: as for `isoform.verify.audit`.
        path: also write the recording there.

    Returns:
        The recording. Values are the run's own tensors: an operation in place on one of them is recorded as a
        new node and its old value kept by a copy.
    """
    subject = Subject(module, inputs)
    with mode(module, training=False):
        recording = _run(subject)
    if path is not None:
        recording.save(path)
    return recording


def _run(subject: Subject) -> Recording:
    from isoform.verify.subject import main_tensor

    recorder = _Recorder(subject)
    # Under autograd PyTorch takes its ordinary paths; without it, fused ones that hide the steps.
    with _plain_paths(), torch.enable_grad(), recorder.modules(), recorder:
        result = subject.module(**{name: _entered(value) for name, value in subject.kwargs.items()})
    reals: dict[str, str] = {}
    contents: dict[str, str] = {}
    for stream in subject.streams:
        name = f"{stream.role}: real"
        recorder.inputs[name] = subject.real(stream)
        reals[stream.role] = name
        ids = f"{stream.name}.ids"
        contents[stream.role] = ids if ids in recorder.inputs else stream.name
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
        output=recorder.ref(main_tensor(result)),
        reals=reals,
        contents=contents,
        trained=frozenset(name for name, _ in subject.module.named_parameters()),
    )


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


def _entered(value: Any) -> Any:
    # Vectors that come from outside get a node of their own, so that others can be put in their place.
    vectors = isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 2
    return value.clone() if vectors else value


def rewritten(old: Tensor, new: Tensor, shape: Geometry, part: Geometry) -> Tensor:
    """The value of a tensor after another one in the same memory was written to in place.

    Args:
        old: its value before.
        new: what the other one holds now.
        shape: sizes, strides and offset of the tensor in the memory.
        part: those of the other one.
    """
    spans = (sum((s - 1) * t for s, t in zip(g[0], g[1], strict=True)) + g[2] + 1 for g in (shape, part))
    memory = old.new_zeros(max(spans))
    memory.as_strided(*shape).copy_(old)
    memory.as_strided(*part).copy_(new)
    return memory.as_strided(*shape).clone()


class _Recorder(TorchDispatchMode):
    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.inputs: dict[str, Tensor] = {}
        self.constants: dict[int, Tensor] = {}
        self.parameters: dict[str, Tensor] = {}
        self._known: dict[int, Ref] = {}
        self._memory: dict[int, list[int]] = {}
        self._alive: list[Any] = []  # ids are only unique while their tensors live
        self._module = subject.module
        self._stack: list[str] = [""]
        for name, value in [*subject.module.named_parameters(), *subject.module.named_buffers()]:
            self.parameters[name] = value.detach()
            self._known[id(value)] = Ref("parameter", name)
        for name, value in subject.kwargs.items():
            for part, tensor in _tensors(name, value):
                self.inputs[part] = tensor.detach()
                self._known[id(tensor)] = Ref("input", part)

    @contextmanager
    def modules(self) -> Generator[None]:
        """Keep track of which module is running."""
        handles: list[Any] = []
        for path, module in self._module.named_modules():

            def enter(_: nn.Module, __: Any, path: str = path) -> None:
                self._stack.append(path)

            def leave(_: nn.Module, __: Any, ___: Any) -> None:
                self._stack.pop()

            handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def ref(self, tensor: Tensor) -> Ref:
        """Where a tensor came from; one never seen before becomes a constant."""
        known = self._known.get(id(tensor))
        if known is None:
            known = Ref("constant", len(self.constants))
            self.constants[len(self.constants)] = tensor.detach()
            self._known[id(tensor)] = known
            self._alive.append(tensor)
        return known

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name.split("::")[-1]
        refs, named = self._as_refs(args), {k: self._as_refs(v) for k, v in kwargs.items()}
        if name.endswith("_") and args and isinstance(args[0], Tensor):
            self._keep_old_value(args[0])
        out = func(*args, **kwargs)
        outputs = [o for o in (out if isinstance(out, tuple | list) else (out,)) if isinstance(o, Tensor)]
        if not outputs or (
            not any(True for _ in _refs((refs, *named.values()))) and name in ("empty", "empty_like")
        ):
            return out
        source = _source()
        for index, value in enumerate(outputs):
            if index and (value.numel() == 0 or name in _BY_PRODUCTS):
                continue
            number = len(self.nodes)
            extra = {**named, "output": index} if index else named
            inplace = name.endswith("_") and not name.startswith("_")
            node = Node(
                number,
                name.rstrip("_"),
                tuple(refs),
                extra,
                value.detach(),
                self._stack[-1],
                source,
                func,
                inplace,
            )
            self.nodes.append(node)
            self._memory.setdefault(value.untyped_storage().data_ptr(), []).append(number)
            self._known[id(value)] = Ref("node", number)
            self._alive.append(value)
            if inplace:
                self._rewrite_aliases(value, number)
        return out

    def _rewrite_aliases(self, part: Tensor, number: int) -> None:
        """After an operation in place, every other tensor in that memory has a new value too."""
        storage = part.untyped_storage().data_ptr()
        for tensor in [t for t in self._alive if t.untyped_storage().data_ptr() == storage]:
            known = self._known[id(tensor)]
            if tensor is part or tensor.dtype != part.dtype or known == Ref("node", number):
                continue
            shapes: list[Geometry] = [
                (tuple(t.shape), tuple(t.stride()), int(t.storage_offset())) for t in (tensor, part)
            ]
            new = len(self.nodes)
            args = (known, Ref("node", number), *shapes)
            value = tensor.detach().clone()
            self.nodes.append(Node(new, "rewritten", args, {}, value, self._stack[-1], _source(), rewritten))
            self._known[id(tensor)] = Ref("node", new)

    def _keep_old_value(self, tensor: Tensor) -> None:
        """Before an operation in place: copy the values of all earlier nodes that live in the same memory."""
        for number in self._memory.pop(tensor.untyped_storage().data_ptr(), []):
            node = self.nodes[number]
            node.value = node.value.clone()

    def _as_refs(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.ref(value)
        if isinstance(value, tuple | list):
            return [self._as_refs(item) for item in value]
        return value


def _refs(value: Any) -> Iterator[Ref]:
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _refs(item)


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors(f"{name}.{field.name}", getattr(value, field.name))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(f"{name}.{key}", item)


def _source() -> str:
    frame = inspect.currentframe()
    while frame is not None and (
        "/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__
    ):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


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
