"""The table of shapes of section 6.7.1 for any configuration, read off the real modules (R25)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from isoform.config import ModelConfig, Stack, Variant
from isoform.cost.groups import LayerGroup, layer_groups, stacks
from isoform.cost.workload import Workload

if TYPE_CHECKING:
    from torch import Tensor, nn

# Operations without parameters: the intermediate they leave, what they do, and which intermediates they read.
OPERATIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "queries": ("split heads", ()),
    "keys": ("split heads", ()),
    "values": ("split heads", ()),
    "scores": ("QKᵀ · scale", ("queries", "keys")),
    "weights": ("softmax", ("scores",)),
    "context": ("read, merge heads", ("weights", "values")),
    "sum": ("residual sum", ("increment", "increment")),  # both branches have its shape
    "hidden": ("activation", ("preactivation", "gate", "content")),
    "pooled": ("pooling", ()),
}


class Row(NamedTuple):
    """One operation.

    Attributes:
        operation: the module's path, or the intermediate's with what makes it; equal layers once.
        input: shapes of what it reads; empty where the table's line above says it.
        parameters: shapes of its own parameters, as they are stored (``[out, in]``).
        output: shape of what it leaves.
    """

    operation: str
    input: str
    parameters: str
    output: str


def shapes(config: ModelConfig, *, batch: int, length: int, source_length: int | None = None) -> list[Row]:
    """Run the network's own modules on the ``meta`` device, which computes shapes only, and take notes.

    Of layers that are configured alike one is run; attention is made explicit, so that the scores and weights
    ``[B, h, T, S]`` that fused kernels never store are seen.

    Args:
        config: the architecture, of any size.
        batch: rows B.
        length: tokens T of the stream the head reads.
        source_length: source tokens S of an encoder–decoder.

    Raises:
        ConfigError: lengths that the network cannot take.
    """
    Workload("prefill", batch, length, source_length).check(config)
    import torch

    from isoform.nn import build, capture
    from isoform.tokens import Tokens

    short, names = _shortened(config)
    with torch.device("meta"):
        model = build(short).eval()
        prefix = torch.zeros(batch, dtype=torch.long)  # read by prefix visibility only
        tokens = Tokens(torch.zeros(batch, length, dtype=torch.long), prefix=prefix)
        source = None
        if source_length is not None:
            source = Tokens(torch.zeros(batch, source_length, dtype=torch.long), prefix=prefix)
        with torch.no_grad(), capture(model, "*") as captured:
            notes = _Notes(model, captured, names)
            handles = [module.register_forward_hook(notes.module) for module in notes.paths]
            try:
                model(tokens, source)
            finally:
                for handle in handles:
                    handle.remove()
            notes.intermediates()
    return notes.rows


class _Notes:
    """Rows in the order in which modules and named intermediates come about."""

    def __init__(self, model: nn.Module, captured: dict[str, Tensor], names: dict[str, str]) -> None:
        self.rows: list[Row] = []
        self.paths = {
            module: path
            for path, module in model.named_modules()
            if any(True for _ in module.parameters(recurse=False)) or not path
        }
        self._captured = captured
        self._names = names
        self._done = 0

    def module(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """A module with parameters of its own has run."""
        self.intermediates()
        path = self.paths[module]
        if not path:
            return
        parameters = (_shape(p) for _, p in module.named_parameters(recurse=False))
        read = (_shape(getattr(x, "ids", x)) for x in inputs[:1])
        result = output[0] if isinstance(output, tuple) else output
        if hasattr(result, "dense"):  # a bias, which is written out only where a kernel needs it
            result = result.dense(next(module.parameters()).dtype)
        self.rows.append(Row(self._called(path), ", ".join(read), ", ".join(parameters), _shape(result)))

    def intermediates(self) -> None:
        """Those seen since the last call."""
        fresh = list(self._captured.items())[self._done :]
        self._done = len(self._captured)
        for path, tensor in fresh:
            parent, _, name = path.rpartition(".")
            if name not in OPERATIONS or parent.endswith("embedding"):
                continue
            what, reads = OPERATIONS[name]
            inputs = [self._captured[f"{parent}.{r}"] for r in reads if f"{parent}.{r}" in self._captured]
            operation = f"{self._called(path)} ({what})"
            self.rows.append(Row(operation, ", ".join(map(_shape, inputs)), "", _shape(tensor)))

    def _called(self, path: str) -> str:
        for short, whole in self._names.items():
            if path.startswith(f"{short}."):
                path = whole + path.removeprefix(short)
        return path.replace(".body", "").replace("source_embedding", "source")


def _shape(tensor: Any) -> str:
    return f"[{', '.join(str(size) for size in tensor.shape)}]"


def _shortened(config: ModelConfig) -> tuple[ModelConfig, dict[str, str]]:
    """The same network with one layer of each kind, and what its layers stand for."""
    changes: dict[str, Stack] = {}
    names: dict[str, str] = {}
    for name, stack in stacks(config):
        groups = layer_groups(stack)
        changes[name] = _one_of_each(stack, groups)
        names |= {f"{name}.layers.{i}": f"{name}.{group.name}" for i, group in enumerate(groups)}
    return config.model_copy(update=changes), names


def _one_of_each(stack: Stack, groups: list[LayerGroup]) -> Stack:
    variants = tuple(
        Variant(layers=(i,), attention=group.layer.attention, feed_forward=group.layer.feed_forward)
        for i, group in enumerate(groups)
    )
    return stack.model_copy(update={"n_layers": len(groups), "variants": variants, "layer_sharing": None})
