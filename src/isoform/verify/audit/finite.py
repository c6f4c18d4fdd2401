"""What stays finite: rows that are all padding, norms of constant vectors. (R41)"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from isoform.verify.audit.report import Check, one_line
from isoform.verify.subject import Subject, main_tensor


def check_masked_rows(subject: Subject) -> Check:
    """A row that is all padding yields finite values and gradients, in half precision too."""
    name, stream = "masked-rows", subject.target
    source = subject.source
    streams = [s for s in (stream, source) if s is not None and s.mask is not None]
    if not streams:
        return Check(name, None, f"{type(subject.module).__name__} takes no padding mask")
    evidence: dict[str, Any] = {}
    for s in streams:
        content, real = subject.content(s), subject.real(s).clone()
        if real.shape[0] < 2:
            return Check(
                name, None, "the batch has one row; at least two are needed to mask one of them whole"
            )
        real[-1] = False
        inputs = subject.with_content(s, content, real)
        for dtype in (None, torch.bfloat16, torch.float16):
            label = f"{s.name}, {'as it is' if dtype is None else str(dtype).removeprefix('torch.')}"
            fault = _finite(subject, inputs, dtype)
            evidence[label] = fault or "finite"
            if fault and not fault.startswith("cannot"):
                return Check(name, False, f"with a row of {s.name} all padding ({label}): {fault}", evidence)
    if "finite" not in evidence.values():
        return Check(name, None, f"with a row all padding it {next(iter(evidence.values()))}", evidence)
    return Check(
        name,
        True,
        "a row that is all padding gives finite values and gradients",
        evidence,
        "values and gradients of this forward pass",
        "loss functions that divide by the number of real tokens",
    )


def _finite(subject: Subject, inputs: dict[str, Any], dtype: torch.dtype | None) -> str | None:
    module, kwargs = subject.module, subject.given(inputs)
    try:
        module = copy.deepcopy(subject.module)
        if dtype is not None:
            module = module.to(dtype)
            kwargs = {
                k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v
                for k, v in kwargs.items()
            }
        module.eval()
        module.zero_grad(set_to_none=True)
        with torch.enable_grad():
            output = main_tensor(module(**kwargs))
            shown = output.float()
            shown.square().mean().backward()
    except Exception as error:
        return f"cannot be run: {one_line(error)}"
    if not bool(output.isfinite().all()):
        rows = (~output.isfinite()).flatten(1).any(-1).nonzero().flatten().tolist()
        return f"non-finite values in rows {rows}"
    for path, parameter in module.named_parameters():
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            return f"non-finite gradient of {path}"
    return None


def check_normalisation(subject: Subject) -> Check:
    """Every norm is finite, in value and gradient, on constant and on tiny-variance vectors."""
    name = "normalisation"
    norms = [(path, m) for path, m in subject.module.named_modules() if _is_norm(m)]
    if not norms:
        return Check(name, None, "no module looks like a normalisation over features")
    worst: dict[str, Any] = {"modules": len(norms)}
    alone = 0
    for path, module in norms:
        alone += 1
        width = _width(module)
        parameter = next(module.parameters(), None)
        dtype = parameter.dtype if parameter is not None else torch.get_default_dtype()
        for label, vector in (
            ("a constant vector", torch.full((1, 2, width), 3.0, dtype=dtype)),
            ("a zero vector", torch.zeros(1, 2, width, dtype=dtype)),
            ("variance 1e-12", 1.0 + 1e-6 * torch.linspace(-1, 1, width, dtype=dtype).expand(1, 2, width)),
        ):
            x = vector.clone().requires_grad_()
            try:
                with torch.enable_grad():
                    y = module(x)
                    (grad,) = torch.autograd.grad(y.square().sum(), x)
            except Exception as error:
                worst[path] = f"cannot be run alone: {one_line(error)}"
                alone -= 1
                break
            if not bool(y.isfinite().all()) or not bool(grad.isfinite().all()):
                what = "value" if not bool(y.isfinite().all()) else "gradient"
                why = "its eps is zero, too small, or in the wrong place"
                statement = f"{path} gives a non-finite {what} on {label}: {why}"
                return Check(name, False, statement, {"module": path, "input": label})
    if not alone:
        path, why = next((path, worst[path]) for path, _ in norms)
        return Check(name, None, f"none of {len(norms)} norms can be run alone: {path} {why}", worst)
    return Check(
        name,
        True,
        f"{alone} of {len(norms)} norms are finite on constant, zero and tiny-variance vectors",
        worst,
        "that eps keeps each norm away from 0/0",
        "whether eps has the value the weights were trained with",
    )


def _is_norm(module: nn.Module) -> bool:
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return len(module.normalized_shape) == 1
    if isinstance(module, nn.modules.batchnorm._BatchNorm | nn.GroupNorm):  # pyright: ignore[reportPrivateUsage]
        return False  # over other axes
    gains = [p.dim() == 1 for p in module.parameters(recurse=False)]
    named = "norm" in type(module).__name__.lower()
    return named and bool(gains) and all(gains) and not list(module.children())


def _width(module: Any) -> int:
    gain = next(module.parameters(), None)
    return int(gain.shape[0] if isinstance(gain, Tensor) else module.normalized_shape[0])
