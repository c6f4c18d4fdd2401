"""Does one model keep its promises? Every check says what it shows and what it does not (R41)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

from torch import nn

from isoform.errors import ConfigError, did_you_mean
from isoform.verify.audit.cached import Step, check_cache
from isoform.verify.audit.causality import Promise, check_causality
from isoform.verify.audit.finite import check_masked_rows, check_normalisation
from isoform.verify.audit.isolation import (
    check_batch_independence,
    check_documents,
    check_prefix,
)
from isoform.verify.audit.losses import check_loss_average, check_loss_shift
from isoform.verify.audit.modes import check_eval_determinism, check_train_dropout
from isoform.verify.audit.padding import check_cross_padding, check_padding
from isoform.verify.audit.paths import check_paths
from isoform.verify.audit.protocol import check_decode_protocol
from isoform.verify.audit.report import NAMES, AuditReport, Check, one_line
from isoform.verify.audit.weights import check_reload, check_ties
from isoform.verify.audit.windows import check_window
from isoform.verify.noise import in_double, is_half
from isoform.verify.subject import Inputs, Subject, mode
from isoform.verify.watching import running

__all__ = ["NAMES", "AuditReport", "Check", "audit"]

_HELD_AGAINST_A_SECOND_RUN = (
    "causality", "prefix", "padding-left", "padding-right", "documents", "window", "cross-padding",
    "batch-independence", "cache", "decode-protocol", "paths", "reload", "loss-shift",
)  # fmt: skip
_UNSETTLED = (
    "two runs in evaluation mode differ (see eval-determinism): what a difference comes from is not told"
)


def audit(
    module: nn.Module,
    inputs: Inputs,
    *,
    promise: Promise | None = None,
    step: Step | None = None,
    window: int | None = None,
    checks: Sequence[str] | None = None,
    compiled: bool = False,
    seed: int = 0,
) -> AuditReport:
    """Check one model against what it promises.

    Args:
        module: any `torch.nn.Module`; its weights, mode and gradients are left as they were.
        inputs: keyword arguments of ``forward`` as a dict, positional ones as a tuple, or a single tensor.
        promise: "causal", "prefix" or "bidirectional"; None reads it off the module, and leaves causality
            unchecked where nothing says what is meant.
        step: a function (ids ``[B, 1]``, state) → (logits, state), for models with a cache of their own.
        window: positions that every layer reads, its own included; None: as the configuration says.
        checks: names of the checks to run; None: all.
        compiled: also compare with `torch.compile`, which takes its time.
        seed: of the contents that are exchanged.

    Returns:
        A report with one `Check` for each name; ``passed`` is None for what could not be run, and why.

    Raises:
        ConfigError: an unknown check.
        ShapeError: inputs in which nothing looks like a sequence.
        DataError: a forward that fails on these inputs.
    """
    for name in checks or ():
        if name not in NAMES:
            raise ConfigError(f"audit: no check is called {name!r}{did_you_mean(name, NAMES)}")
    with mode(module, training=False):
        subject = Subject(module, inputs)
        with running(module):
            subject.run(grad=True)
        wide_module, wide_inputs = in_double(module, subject.given())
        wide = Subject(wide_module.eval(), wide_inputs)
        fine = wide if is_half(module) else subject
        runs: dict[str, Callable[[], Check]] = {
            "causality": lambda: check_causality(wide, promise, seed=seed),
            "prefix": lambda: check_prefix(wide, promise, seed=seed),
            "padding-left": lambda: check_padding(wide, "left", seed=seed),
            "padding-right": lambda: check_padding(wide, "right", seed=seed),
            "documents": lambda: check_documents(wide, seed=seed),
            "window": lambda: check_window(wide, window, seed=seed),
            "cross-padding": lambda: check_cross_padding(wide, seed=seed),
            "batch-independence": lambda: check_batch_independence(wide),
            "cache": lambda: check_cache(subject if step is not None else wide, step),
            "decode-protocol": lambda: check_decode_protocol(wide),
            "train-dropout": lambda: check_train_dropout(subject),
            "paths": lambda: check_paths(fine, compiled=compiled),
            "masked-rows": lambda: check_masked_rows(subject),
            "normalisation": lambda: check_normalisation(Subject(copy.deepcopy(module), subject.kwargs)),
            "ties": lambda: check_ties(subject),
            "reload": lambda: check_reload(subject),
            "loss-shift": lambda: check_loss_shift(fine),
            "loss-average": lambda: check_loss_average(fine),
        }
        settled = _run("eval-determinism", lambda: check_eval_determinism(subject))
        runs["eval-determinism"] = lambda: settled
        if settled.passed is False:
            for name in _HELD_AGAINST_A_SECOND_RUN:
                runs[name] = lambda name=name: Check(name, None, _UNSETTLED)
        results = tuple(_run(name, runs[name]) for name in NAMES if checks is None or name in checks)
    return AuditReport(type(module).__name__, results)


def _run(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:  # of other people's modules, which may raise anything
        return Check(name, None, f"it could not be run on this model: {one_line(error)}")
