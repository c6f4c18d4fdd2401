"""Gradients of two models, weight by weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from isoform.verify.align import Model
from isoform.verify.comparison import Row
from isoform.verify.derivatives import derivatives
from isoform.verify.measure import lines, relative
from isoform.verify.points import alike
from isoform.verify.rows import match_rows
from isoform.verify.subject import Inputs, Subject, main_tensor, mode


def gradients(
    a: Model, b: Model, modules: tuple[nn.Module, nn.Module], inputs: tuple[Inputs, Inputs], eps: float
) -> list[Row]:
    """Gradients of a fixed weighted sum of the results, for each weight matrix both have."""
    grads = [_gradients(m, x, given) for m, x, given in zip((a, b), modules, inputs, strict=True)]
    rows: list[Row] = []
    ours, theirs = (
        {n: (m.recording.parameters[n], g) for n, g in found.items() if m.recording.parameters[n].dim() == 2}
        for m, found in zip((a, b), grads, strict=True)
    )
    twins = {name: _twin(value, theirs) for name, (value, _) in ours.items()}
    taken = {twin[0][0] for twin in twins.values() if twin is not None}
    left = {name: pair for name, pair in theirs.items() if name not in taken}
    for name, (value, grad) in ours.items():
        twin = twins[name] or _gathered(value, left)
        if twin is not None:
            names, again = twin
            error = relative(grad, again)
            expected = 1e4 * eps
            rows.append(Row("gradient", None, name, " + ".join(names), error, expected, tuple(grad.shape)))
    return rows


def _gradients(model: Model, module: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    named = {n: p for n, p in module.named_parameters() if p.requires_grad}
    with mode(module, training=False), torch.enable_grad():
        out = main_tensor(module(**Subject(module, inputs).kwargs))
        value = model.graph.canonical(out, model.width(model.graph.output), model.graph.output)
        assert value is not None
        weight = _weights(value, model.real(model.role(model.graph.output)))
        found = derivatives(value, list(named.values()), weight)
    return {n: g for n, g in zip(named, found, strict=True) if g is not None}


def _weights(value: Tensor, real: Tensor) -> Tensor:
    """Random numbers ``[B, T, …]``, in both models the same, zero where there is padding."""
    generator = torch.Generator().manual_seed(4)
    weight = torch.empty_like(value)
    for number, row in enumerate(weight):
        for start, part in lines(row):
            part.copy_(torch.randn(part.shape, generator=generator, dtype=torch.float64))
            if real.shape == value.shape[:2]:
                part[~real[number, start : start + len(part)]] = 0.0
    return weight


def _twin(value: Tensor, others: dict[str, tuple[Tensor, Tensor]]) -> tuple[list[str], Tensor] | None:
    """The gradient of the same matrix in another model, wherever that keeps it; None: nowhere."""
    for name, (twin, grad) in others.items():
        for weight, slope in ((twin, grad), (twin.t(), grad.t())):
            if value.shape == weight.shape and alike(value, weight):
                return [name], slope
    return None


def _gathered(value: Tensor, others: dict[str, tuple[Tensor, Tensor]]) -> tuple[list[str], Tensor] | None:
    """Likewise where its rows, or columns, are in other places: concatenated, split, permuted or scaled."""
    for flip in (False, True):
        rows = value.t() if flip else value
        found = torch.zeros(len(rows), dtype=torch.bool)
        gathered, names = torch.zeros_like(rows), list[str]()
        for name, (twin, grad) in others.items():
            for weight, slope in ((twin, grad), (twin.t(), grad.t())):
                if weight.shape[1] != rows.shape[1] or bool(found.all()):
                    continue
                match = match_rows(weight, rows)
                fresh = (match.index >= 0) & ~found
                if bool(fresh.any()):
                    scale = match.scale[fresh, None].to(slope)
                    gathered[fresh] = slope[match.index[fresh]] / scale
                    names.append(name)
                found |= fresh
        if bool(found.all()):
            return names, gathered.t() if flip else gathered
    return None
