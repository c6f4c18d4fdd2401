"""Running a decoder in steps: by Hugging Face's ``past_key_values``, or by a function of the user's."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from isoform.verify.subject import Subject, main_tensor

# A user's step: ids [B, n] and whatever the last call returned → logits [B, n, V] and the new state.
Step = Callable[[Tensor, Any], tuple[Tensor, Any]]


@dataclasses.dataclass(eq=False)
class Stepper:
    """A way to run a model in steps.

    Args:
        subject: the model and its inputs.
        call: (start, ids ``[B, n]``, state) → (logits, state).
        chunks: several positions can be given at once.
        name: how it is done.
        reorder: (state, order of rows) → the state of the rows in that order; None: no way is known.
    """

    subject: Subject
    call: Callable[[int, Tensor, Any], tuple[Tensor, Any]]
    chunks: bool
    name: str
    reorder: Callable[[Any, Tensor], Any] | None = None

    def run(self, sizes: Sequence[int]) -> Tensor:
        """Results ``[B, T, V]`` of steps of these sizes."""
        ids = self.subject.content(self.subject.target)
        state, at, found = None, 0, list[Tensor]()
        with torch.no_grad():
            for size in sizes:
                logits, state = self.call(at, ids[:, at : at + size], state)
                found.append(logits if logits.dim() == 3 else logits[:, None])
                at += size
        return torch.cat(found, 1)

    def swapped(self, half: int) -> tuple[Tensor, Tensor] | None:
        """Steps of which the second half goes on with the rows in the opposite order, as beams may.

        Returns:
            Results ``[B, T, V]`` of the rows in the opposite order, and the order; None: no way is known.
        """
        ids = self.subject.content(self.subject.target)
        order = torch.arange(len(ids) - 1, -1, -1, device=ids.device)
        other = stepper(Subject(self.subject.module, self.subject.rows(order)))
        if self.reorder is None or other is None or len(ids) < 2:
            return None
        state, found = None, list[Tensor]()
        with torch.no_grad():
            for at in range(ids.shape[1]):
                if at == half:
                    state = self.reorder(state, order)
                by, row = (self, ids) if at < half else (other, ids[order])
                logits, state = by.call(at, row[:, at : at + 1], state)
                found.append(logits[order] if at < half else logits)
        return torch.cat(found, 1), order

    def at(self, place: int) -> tuple[nn.Module, dict[str, Tensor]]:
        """The single step at a place as a module of its own, with what it reads."""
        ids = self.subject.content(self.subject.target)
        state: Any = None
        with torch.no_grad():
            for t in range(place):
                _, state = self.call(t, ids[:, t : t + 1], state)
        return _OneStep(self, place, state), {"ids": ids[:, place : place + 1]}


class _OneStep(nn.Module):
    def __init__(self, stepper: Stepper, place: int, state: Any) -> None:
        super().__init__()
        self.module = stepper.subject.module
        self._held = (stepper, place, state)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of one step."""
        stepper, place, state = self._held
        logits, _ = stepper.call(place, ids, copy.deepcopy(state))
        return logits if logits.dim() == 3 else logits[:, None]


def stepper(subject: Subject, step: Step | None = None) -> Stepper | None:
    """How a model can be run in steps; None: in no way that is known."""
    if subject.content(subject.target).is_floating_point():
        return None
    if step is not None:
        return Stepper(subject, lambda _, ids, state: step(ids, state), False, "the given step function")
    past = past_name(subject.module)
    if past is None:
        return None
    call = functools.partial(_with_past, subject, past)
    return Stepper(subject, call, True, past, functools.partial(_reordered, subject.module))


def past_name(module: nn.Module) -> str | None:
    """The argument by which a decoder takes its past: late versions of transformers call it ``cache``."""
    names = inspect.signature(module.forward).parameters
    cache = "cache" if "cache" in names and "use_cache" in names else None
    found = "past_key_values" if "past_key_values" in names else cache
    return found if _is_decoder(module) else None


def _is_decoder(module: Any) -> bool:
    """Encoders take the argument too."""
    config = getattr(module, "config", None)
    both = getattr(config, "is_encoder_decoder", False)
    encoder_only = getattr(config, "is_decoder", None) is False and not both
    name = type(module).__name__
    return not encoder_only or "CausalLM" in name or "LMHead" in name


def _reordered(module: Any, past: Any, order: Tensor) -> Any:
    """As beam search does it: by the cache's own means, else by the model's."""
    if hasattr(past, "reorder_cache"):
        again = past.reorder_cache(order)
        return past if again is None else again
    return module._reorder_cache(past, order)


def _with_past(subject: Subject, argument: str, at: int, ids: Tensor, past: Any) -> tuple[Tensor, Any]:
    name = subject.target.name
    left_out = (name, "position_ids", "labels", "cache_position", "token_type_ids")
    inputs = {k: v for k, v in subject.kwargs.items() if k not in left_out}
    inputs |= {name: ids, argument: past, "use_cache": True}
    end = at + ids.shape[1]
    mask = subject.target.mask
    if mask is not None and mask in subject.kwargs:
        inputs[mask] = subject.kwargs[mask][:, :end]
    for extra in ("position_ids", "token_type_ids"):
        if extra in subject.kwargs:
            inputs[extra] = subject.kwargs[extra][:, at:end]
    result = subject.module(**inputs)
    past = result[argument] if isinstance(result, dict) else getattr(result, argument)
    return main_tensor(result), past
