"""For tests: fail with a message worth reading when a promise does not hold."""

from __future__ import annotations

from torch import nn

from isoform.verify.audit import audit
from isoform.verify.diagnose import diagnose
from isoform.verify.subject import Inputs


def assert_equivalent(
    reference: nn.Module, candidate: nn.Module, inputs: Inputs, candidate_inputs: Inputs | None = None
) -> None:
    """Both models are the same function, up to rounding.

    Raises:
        AssertionError: they are not; the message names every cause and its place.
    """
    found = diagnose(reference, candidate, inputs, candidate_inputs)
    if found.verdict == "differs":
        raise AssertionError(str(found))


def assert_causal(module: nn.Module, inputs: Inputs) -> None:
    """No position reads a later one, in any layer.

    Raises:
        AssertionError: one does, or it could not be checked.
    """
    _assert(module, inputs, "causality", causal=True)


def assert_padding_isolated(module: nn.Module, inputs: Inputs) -> None:
    """What stands at padded positions reaches no real one, on either side.

    Raises:
        AssertionError: it does, or the module takes no padding mask.
    """
    _assert(module, inputs, "padding-left")
    _assert(module, inputs, "padding-right")


def assert_batch_independent(module: nn.Module, inputs: Inputs) -> None:
    """A row's result does not depend on the other rows.

    Raises:
        AssertionError: it does.
    """
    _assert(module, inputs, "batch-independence")


def assert_cache_exact(module: nn.Module, inputs: Inputs) -> None:
    """Step by step with the cache gives what one pass over everything gives.

    Raises:
        AssertionError: it does not, or the module has no cache that is known.
    """
    _assert(module, inputs, "cache")


def _assert(module: nn.Module, inputs: Inputs, name: str, *, causal: bool = False) -> None:
    check = audit(module, inputs, promise="causal" if causal else None, checks=[name])[name]
    if check.passed is not True:
        what = "could not be checked" if check.passed is None else "does not hold"
        raise AssertionError(f"{type(module).__name__}: {name} {what}: {check.statement}")
