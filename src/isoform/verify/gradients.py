"""Gradients of two models, weight by weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from isoform.verify.align import Model
from isoform.verify.comparison import Row
from isoform.verify.derivatives import derivatives
from isoform.verify.points import alike
from isoform.verify.subject import Inputs, Subject, main_tensor, mode


def gradients(
    a: Model, b: Model, modules: tuple[nn.Module, nn.Module], inputs: tuple[Inputs, Inputs], eps: float
) -> list[Row]:
    """Gradients of a fixed weighted sum of the results, for each weight matrix both have."""
    grads: list[dict[str, Tensor]] = []
    for model, module, given in zip((a, b), modules, inputs, strict=True):
        subject = Subject(module, given)
        with mode(module, training=False), torch.enable_grad():
            out = main_tensor(module(**subject.kwargs))
            value = model.graph.canonical(out, model.width(model.graph.output), model.graph.output)
            assert value is not None
            real = model.real(model.role(model.graph.output))
            generator = torch.Generator().manual_seed(4)
            weight = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
            if real.shape == value.shape[:2]:
                value, weight = value[real], weight[real]
            named = {n: p for n, p in module.named_parameters() if p.requires_grad}
            found = derivatives((value * weight).sum(), list(named.values()))
        grads.append({n: g for n, g in zip(named, found, strict=True) if g is not None})
    rows: list[Row] = []
    parameters = [m.recording.parameters for m in (a, b)]
    for name, grad in grads[0].items():
        value = parameters[0][name]
        if value.dim() < 2:
            continue
        for other, again in grads[1].items():
            twin = parameters[1][other]
            if value.shape == twin.shape and alike(value, twin):
                x, y = grad, again
            elif value.shape == twin.t().shape and twin.dim() == 2 and alike(value, twin.t()):
                x, y = grad, again.t()
            else:
                continue
            error = float((x.double() - y.double()).abs().max() / x.double().abs().max().clamp(min=1e-30))
            rows.append(Row("gradient", None, name, other, error, 1e4 * eps, tuple(x.shape)))
            break
    return rows
