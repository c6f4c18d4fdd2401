"""The listener below every coding style: each operator of a pass, as it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from isoform.verify.recording import Geometry, Node, Ref, geometry, owns, references, rewritten
from isoform.verify.sources import source as current
from isoform.verify.spool import Mapped, Spool
from isoform.verify.subject import Subject
from isoform.verify.watching import tensors

# Further outputs of these are by-products that nothing in a forward pass reads.
_BY_PRODUCTS = frozenset(("native_layer_norm", "native_dropout", "native_batch_norm", "native_group_norm"))
# Outputs of these are all alike; an empty one may be where no token chose an expert.
_PARTS = frozenset(("unbind", "split", "split_with_sizes", "chunk", "tensor_split"))


@dataclasses.dataclass
class _Memory:
    """What is known of a piece of memory while something lives in it.

    Attributes:
        alive: expires with it, so that its number is not taken for another's.
        nodes: operations whose values lie in it and are kept there.
        outside: parameters, inputs and constants in it, as (where they are noted, their name).
        written: where it stands in the spool, and its bytes.
    """

    alive: StorageWeakRef
    nodes: list[int] = dataclasses.field(default_factory=list[int])
    outside: list[tuple[dict[Any, Tensor], Any]] = dataclasses.field(
        default_factory=list[tuple[dict[Any, Tensor], Any]]
    )
    written: tuple[int, int] | None = None


class Recorder(TorchDispatchMode):
    """Notes operations while it is active.

    Args:
        subject: the module and its inputs.
        in_memory: bytes of values to keep in memory; the others are spooled.

    Attributes:
        nodes, parameters, inputs, constants: as in a `Recording`; complete after `finish`.
    """

    def __init__(self, subject: Subject, in_memory: int) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.inputs: dict[str, Tensor] = {}
        self.constants: dict[int, Tensor] = {}
        self.parameters: dict[str, Tensor] = {}
        self._left = in_memory
        self._spool: Spool | None = None
        self._places: dict[int, tuple[int, int, torch.dtype, Geometry]] = {}
        # By identity and only while they live: an activation that the module drops is not kept for this.
        self._known = WeakIdKeyDictionary()
        self._memory: dict[int, _Memory] = {}
        self._module = subject.module
        self._stack: list[str] = [""]
        self._dividing = False
        for name, value in [*subject.module.named_parameters(), *subject.module.named_buffers()]:
            self._outside(value, Ref("parameter", name), self.parameters)
        for name, value in subject.kwargs.items():
            for part, tensor in tensors(value, name):
                self._outside(tensor, Ref("input", part), self.inputs)

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
        known = self._known.get(tensor)
        if known is None:
            known = Ref("constant", len(self.constants))
            self._outside(tensor, known, self.constants)
        return known

    def finish(self) -> Mapped | None:
        """Give the nodes whose values were spooled those values back, mapped from a file."""
        if self._spool is None:
            return None
        mapped = self._spool.mapped()
        for number, value in mapped.values(self._places).items():
            self.nodes[number].value = value
        return mapped

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name.split("::")[-1]
        if name == "_scaled_dot_product_flash_attention_for_cpu":  # asked for within the module
            return self._in_parts(*args, **kwargs)
        if self._dividing:  # operators made of others come here whole, and in no other place
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        refs, named = self._as_refs(args), {k: self._as_refs(v) for k, v in kwargs.items()}
        inplace = name.endswith("_") and not name.startswith("_")
        if name.endswith("_") and args and isinstance(args[0], Tensor):
            self._keep_old_values(args[0])
        out = func(*args, **kwargs)
        outputs = [o for o in (out if isinstance(out, tuple | list) else (out,)) if isinstance(o, Tensor)]
        made_of_nothing = not any(True for _ in references((refs, *named.values())))
        if not outputs or (made_of_nothing and name in ("empty", "empty_like")):
            return out
        source = current()
        for index, value in enumerate(outputs):
            if index and (name in _BY_PRODUCTS or (value.numel() == 0 and name not in _PARTS)):
                continue
            extra = {**named, "output": index} if index else named
            node = self._note(name.rstrip("_"), tuple(refs), extra, value, source, func, inplace)
            if inplace:
                self._rewrite_aliases(value, node, source)
        return out

    def _in_parts(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, *,
        attn_mask: Tensor | None = None, scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """A fused attention as products and softmax; its second result is read in backward passes alone."""
        shared = q.shape[1] != k.shape[1]
        self._dividing = True
        try:
            with self:
                out, _ = torch.ops.aten._scaled_dot_product_attention_math(
                    q, k, v, attn_mask, dropout, causal, None, scale=scale, enable_gqa=shared
                )
        finally:
            self._dividing = False
        return out, q.new_zeros(q.shape[:-1])

    def _note(
        self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], value: Tensor, source: str,
        call: Any, inplace: bool = False,
    ) -> int:  # fmt: skip
        number = len(self.nodes)
        node = Node(number, op, args, kwargs, value.detach(), self._stack[-1], source, call, inplace)
        self.nodes.append(node)
        self._keep(node)
        self._known[value] = Ref("node", number)
        return number

    def _keep(self, node: Node) -> None:
        """Leave a node's value in memory, or write it to the spool and let go of it."""
        if node.value.is_conj() or node.value.is_neg():  # a sign that is only noted gets memory of its own
            node.value = node.value.resolve_conj().resolve_neg()
        value, memory = node.value, self._memory_of(node.value)
        here = memory.nodes or memory.outside
        if not here and memory.written is None:
            size = value.untyped_storage().nbytes()
            if size <= self._left or not _spoolable(value):
                self._left -= size
            else:
                self._spool = self._spool or Spool()
                # A view of memory that was never seen as a whole is written as a tensor of its own.
                content = value if owns(value) else value.clone(memory_format=torch.contiguous_format)
                start, size = self._spool.add(content), content.numel() * content.element_size()
                if owns(value):
                    memory.written = start, size
                self._places[node.number] = (start, size, value.dtype, geometry(content))
                node.value = value.new_empty(0)
                return
        if memory.written is not None:
            self._places[node.number] = (*memory.written, value.dtype, geometry(value))
            node.value = value.new_empty(0)
        else:
            memory.nodes.append(node.number)

    def _memory_of(self, tensor: Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        found = self._memory.get(storage._cdata)  # pyright: ignore[reportPrivateUsage]
        if found is None or found.alive.expired():
            alive = StorageWeakRef(storage)
            found = self._memory[storage._cdata] = _Memory(alive)  # pyright: ignore[reportPrivateUsage]
        return found

    def _outside(self, tensor: Tensor, ref: Ref, noted: dict[Any, Tensor]) -> None:
        noted[ref.name] = tensor.detach()
        self._memory_of(tensor).outside.append((noted, ref.name))
        self._known[tensor] = ref

    def _keep_old_values(self, tensor: Tensor) -> None:
        """Before an operation in place: copy every value noted so far that lives in the same memory."""
        memory = self._memory_of(tensor)
        nodes, memory.nodes = memory.nodes, []
        outside, memory.outside = memory.outside, []
        memory.written = None  # what is on disk already is the old value
        for number in nodes:
            node = self.nodes[number]
            node.value = node.value.clone()
            self._keep(node)
        for noted, name in outside:
            noted[name] = noted[name].clone()

    def _rewrite_aliases(self, part: Tensor, number: int, source: str) -> None:
        """After an operation in place, every other tensor in that memory has a new value too."""
        memory = part.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
        for tensor, known in list(self._known.items()):
            if tensor is part or tensor.dtype != part.dtype or known == Ref("node", number):
                continue
            if tensor.untyped_storage()._cdata == memory:  # pyright: ignore[reportPrivateUsage]
                args = (known, Ref("node", number), *([*map(_listed, geometry(t))] for t in (tensor, part)))
                self._note("rewritten", args, {}, tensor, source, rewritten)

    def _as_refs(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.ref(value)
        if isinstance(value, tuple | list):
            return [self._as_refs(item) for item in value]
        return value


def _listed(value: Any) -> Any:
    """Arguments are kept as lists, as files give them back."""
    return list(value) if isinstance(value, tuple) else value


def _spoolable(value: Tensor) -> bool:
    return value.device.type == "cpu" and value.layout == torch.strided and value.numel() > 0
