"""Look at, or replace, any intermediate of a network by name, through the one code path that there is.

Modules call ``tap(self, "weights", tensor)`` on every named intermediate. Without a recorder that is a
comparison with None; with one, the tensor is kept, replaced, or both.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from isoform.errors import ConfigError, did_you_mean

_recorder: Recorder | None = None


def tap(module: nn.Module, name: str, value: Tensor) -> Tensor:
    """Show an intermediate to the recorder, if one listens; returns what the network goes on with."""
    return value if _recorder is None else _recorder.see(module, name, value)


def wanted(module: nn.Module, *names: str) -> bool:
    """Whether the recorder wants one of these intermediates, so that it has to be made explicit."""
    return _recorder is not None and any(_recorder.wants(module, name) for name in names)


def listening() -> bool:
    """Whether a recorder is at work, so that every tap has to be passed."""
    return _recorder is not None


class Recorder:
    """Keeps what `capture` yields: ``captured[dotted name]`` is the tensor seen there."""

    def __init__(
        self, model: nn.Module, patterns: Sequence[str], replace: Mapping[str, Callable[[Tensor], Tensor]]
    ) -> None:
        self.captured: dict[str, Tensor] = {}
        self.seen: list[str] = []
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._patterns = tuple(patterns)
        self._replace = dict(replace)

    def path(self, module: nn.Module, name: str) -> str:
        """The dotted name of an intermediate."""
        path = self._paths.get(id(module), "")
        return f"{path}.{name}" if path else name

    def wants(self, module: nn.Module, name: str) -> bool:
        """Whether this intermediate is to be kept or replaced."""
        path = self.path(module, name)
        return any(fnmatch.fnmatchcase(path, p) for p in (*self._patterns, *self._replace))

    def see(self, module: nn.Module, name: str, value: Tensor) -> Tensor:
        """Take note of an intermediate."""
        path = self.path(module, name)
        self.seen.append(path)
        for pattern, change in self._replace.items():
            if fnmatch.fnmatchcase(path, pattern):
                value = change(value)
        if any(fnmatch.fnmatchcase(path, p) for p in self._patterns):
            self.captured[path] = value
        return value


@contextmanager
def capture(
    model: nn.Module, *patterns: str, replace: Mapping[str, Callable[[Tensor], Tensor]] | None = None
) -> Generator[dict[str, Tensor]]:
    """Record intermediates whose dotted name matches a pattern (``*`` matches any run of characters).

    Args:
        model: the network that will be run inside the ``with`` block.
        patterns: e.g. ``"decoder.layers.*.attention.body.weights"`` or ``"*"``. Naming scores or weights
            makes attention explicit in those layers; nothing else changes.
        replace: for each pattern a function from the tensor seen to the tensor to go on with.

    Yields:
        A dict that fills while the network runs. Tensors keep their graph; a module that runs several
        times (shared layers, cached steps) leaves its last value.

    Raises:
        ConfigError: a pattern that matched nothing, or a capture inside another one.
    """
    global _recorder
    if _recorder is not None:
        raise ConfigError("capture: already recording; name all intermediates in one call")
    recorder = Recorder(model, patterns, replace or {})
    _recorder = recorder
    try:
        yield recorder.captured
    finally:
        _recorder = None
    for pattern in (*patterns, *(replace or {})):
        if recorder.seen and not any(fnmatch.fnmatchcase(path, pattern) for path in recorder.seen):
            raise ConfigError(
                f"capture: nothing is called {pattern!r}{did_you_mean(pattern, dict.fromkeys(recorder.seen))}"
            )
