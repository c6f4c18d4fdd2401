"""Training and evaluation, gradient modes, backends: do they compute what they should? (R33, R41)"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from isoform.verify.audit.report import Check
from isoform.verify.noise import largest_difference
from isoform.verify.subject import Subject, mode


def check_eval_determinism(subject: Subject) -> Check:
    """Two runs in evaluation mode are equal to the bit."""
    a, b = subject.run().output, subject.run().output
    if torch.equal(a.nan_to_num(), b.nan_to_num()):
        return Check("eval-determinism", True, "two runs in evaluation mode are equal to the bit")
    gap = largest_difference(a, b)
    return Check(
        "eval-determinism",
        False,
        f"two runs in evaluation mode differ by {gap:.3g}: dropout stays on",
        {"size": gap},
    )


def check_train_dropout(subject: Subject) -> Check:
    """Where dropout is configured, two runs in training mode differ."""
    rates = sorted(dropout_rates(subject.module))
    if not rates or rates[-1] == 0.0:
        return Check("train-dropout", None, "no dropout is configured")
    with mode(subject.module, training=True):
        a, b = subject.run().output, subject.run().output
    if torch.equal(a, b):
        statement = (
            f"dropout {rates[-1]:g} is configured, but two runs in training mode are equal: it never acts"
        )
        return Check("train-dropout", False, statement, {"rate": rates[-1]})
    gap = largest_difference(a, b)
    return Check(
        "train-dropout",
        True,
        f"dropout {rates[-1]:g} acts in training mode: two runs differ by {gap:.3g}",
        {"size": gap},
    )


def dropout_rates(module: nn.Module) -> set[float]:
    """Every dropout probability found in modules or their settings."""
    modules: list[Any] = list(module.modules())
    rates = {float(m.p) for m in modules if isinstance(m, nn.Dropout | nn.Dropout1d)}
    for holder in (*modules, *(getattr(m, "cfg", None) for m in modules)):
        rate = getattr(holder, "dropout", None)
        if isinstance(rate, float):
            rates.add(rate)
    return rates
