"""Gradients of two models, weight by weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from isoform.verify.align import Model
from isoform.verify.comparison import Row
from isoform.verify.derivatives import derivatives
from isoform.verify.points import alike
from isoform.verify.rows import match_rows
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
    ours, theirs = (
        {n: (m.recording.parameters[n], g) for n, g in found.items() if m.recording.parameters[n].dim() == 2}
        for m, found in zip((a, b), grads, strict=True)
    )
    for name, (value, grad) in ours.items():
        twin = _twin(value, theirs)
        if twin is not None:
            names, again = twin
            error = float((grad - again).abs().max() / grad.abs().max().clamp(min=1e-30))
            expected = 1e4 * eps
            rows.append(Row("gradient", None, name, " + ".join(names), error, expected, tuple(grad.shape)))
    return rows


def _twin(value: Tensor, others: dict[str, tuple[Tensor, Tensor]]) -> tuple[list[str], Tensor] | None:
    """The gradient of the same weights in another model, wherever that keeps them; None: nowhere."""
    for name, (twin, grad) in others.items():
        for weight, slope in ((twin, grad), (twin.t(), grad.t())):
            if value.shape == weight.shape and alike(value, weight):
                return [name], slope
    # Rows, or columns, in other places: concatenated, split, permuted or scaled.
    for flip in (False, True):
        rows = value.t() if flip else value
        found = torch.zeros(len(rows), dtype=torch.bool)
        gathered, names = torch.zeros_like(rows), list[str]()
        for name, (twin, grad) in others.items():
            for weight, slope in ((twin, grad), (twin.t(), grad.t())):
                if weight.shape[1] != rows.shape[1] or bool(found.all()):
                    continue
                match = match_rows(weight.double(), rows.double())
                fresh = (match.index >= 0) & ~found
                if bool(fresh.any()):
                    scale = match.scale[fresh, None].to(slope)
                    gathered[fresh] = slope[match.index[fresh]] / scale
                    names.append(name)
                found |= fresh
        if bool(found.all()):
            return names, gathered.t() if flip else gathered
    return None
