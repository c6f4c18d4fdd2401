"""What a module and its parts give while it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from isoform.errors import DataError, IsoformError, ShapeError


@dataclasses.dataclass(frozen=True, eq=False)
class Seen:
    """One module's output in one run; ``inline``: the result of a function between modules."""

    path: str
    value: Tensor
    inline: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """One forward pass: what every submodule returned, in order, and the module's own result."""

    seen: tuple[Seen, ...]
    output: Tensor
    result: Any

    def find(self, path: str) -> Tensor:
        """The last value seen at a path."""
        return next(s.value for s in reversed(self.seen) if s.path == path)


_RESULTS = (
    "logits", "prediction_logits", "lm_logits", "scores", "log_probs", "logprobs",
    "last_hidden_state", "hidden", "pooled",
)  # fmt: skip
"""What the tensor that a result is about is called, where it holds several."""


def main_tensor(result: Any) -> Tensor:
    """The tensor a module's result is about: logits, else the last hidden state, else the first tensor."""
    if isinstance(result, Tensor):
        return result
    for name in _RESULTS:
        value = result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)
        if isinstance(value, Tensor):
            return value
    values = list(result.values()) if isinstance(result, Mapping) else result
    if isinstance(values, tuple | list):
        for value in values:
            if isinstance(value, Tensor) and value.dim() >= 2:
                return value
    raise ShapeError(f"a forward pass returned {type(result).__name__}, which holds no tensor to look at")


@contextmanager
def watching(module: nn.Module, seen: list[Seen]) -> Generator[None]:
    """Append every submodule's floating-point output to ``seen`` while the block runs."""

    def listen(path: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            value = output
            if not isinstance(output, Tensor):
                try:
                    value = main_tensor(output)
                except (ShapeError, TypeError):
                    return
            if value.is_floating_point() and not value.is_nested:
                seen.append(Seen(path, value))

        return hook

    handles = [m.register_forward_hook(listen(path)) for path, m in module.named_modules() if path]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def running(module: nn.Module) -> Generator[None]:
    """Around a pass of other people's code: what it raises comes with the name of the module, on one line.

    Raises:
        DataError: whatever was raised, but for what is raised on purpose.
    """
    try:
        yield
    except IsoformError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:200]
        name = f"{type(module).__name__}.forward"
        raise DataError(f"{name} fails on these inputs: {type(error).__name__}: {said}") from error


@contextmanager
def mode(module: nn.Module, *, training: bool) -> Generator[None]:
    """Put a module and all its parts in training or evaluation mode, and back to how each was."""
    before = {m: m.training for m in module.modules()}
    module.train(training)
    try:
        yield
    finally:
        for m, flag in before.items():
            m.training = flag


def tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in nested arguments or results, with where it is: ``name.field.0``."""
    if isinstance(value, Tensor):
        yield name, value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name), f"{name}.{field.name}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors(item, f"{name}.{key}")
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from tensors(item, f"{name}.{index}")


def averages(weights: Tensor, axis: int = -1) -> bool:
    """Whether these are weights of averages along an axis, as attention has them; of nothing, zeros."""
    if not weights.is_floating_point() or not bool((weights >= 0).all()):
        return False
    total = weights.sum(axis)
    return bool(((total - 1).abs() < 0.02).logical_or(total == 0).all())


def batch_time(seen: Seen, batch: int, length: int) -> Seen | None:
    """A value with its batch and time axes in front; None where it has none, or two that could be time."""
    value = seen.value
    if not seen.inline and value.dim() >= 4 and value.shape[1] == value.shape[2] == length:
        return None
    if value.dim() >= 3 and value.shape[0] == batch and value.shape[1] == length:
        return seen
    if value.dim() >= 3 and value.shape[0] == length and value.shape[1] == batch:
        return dataclasses.replace(seen, value=value.transpose(0, 1))
    if value.dim() >= 4 and value.shape[0] == batch and value.shape[2] == length:
        if value.shape[-1] == length and not averages(value):  # scores, before they are masked
            return None
        return dataclasses.replace(seen, value=value.transpose(1, 2))
    if value.dim() == 2 and value.shape[0] == batch * length and length > 1:
        return dataclasses.replace(seen, value=value.view(batch, length, -1))
    return None
