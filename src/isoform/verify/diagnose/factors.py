"""What the vectors of tokens, or a branch, are multiplied by, and what is added to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isoform.verify.align import Model
from isoform.verify.diagnose.case import Case
from isoform.verify.diagnose.positions import explain_shift
from isoform.verify.diagnose.report import Place
from isoform.verify.diagnose.unary import Step, close, function, gap, said
from isoform.verify.diagnose.wiring import Wire


def affine(case: Case, place: Place, wa: Wire, wb: Wire, a: Step, b: Step) -> None:
    entry = wb.source in case.b.structure.entries and wb.what == "trunk"
    role = case.a.role(wa.source)
    table = 1.0
    if entry and wb.source not in case.foreign_entries:
        va, vb = case.a.of_node(wa.source), case.b.of_node(wb.source)
        assert va is not None and vb is not None
        table = float((va * vb).sum() / va.square().sum())
    scale_b = b.scale * table if entry else b.scale
    if not _equal_scales(a.scale, scale_b, case.constants):
        multiplied(case, place, wa, wb, a.scale, scale_b)
    if wb.what == "add" and not entry:
        return
    zero = case.a.of_node(wa.target)
    assert zero is not None
    shift_a = torch.zeros_like(zero) if a.shift is None else a.shift
    shift_b = torch.zeros_like(shift_a) if b.shift is None else b.shift
    if shift_a.shape == shift_b.shape and case.differ(shift_a, shift_b, role) > 1e-6:
        explain_shift(case, place, shift_a, shift_b, role, wb.target)


def multiplied(
    case: Case, place: Place, wa: Wire, wb: Wire, one: float | Tensor, two: float | Tensor
) -> None:
    """Name a factor by what is multiplied: the vectors that tokens begin as, or a branch."""
    first = begins(case.a, wa) and begins(case.b, wb)
    what = "token vectors" if first else "this branch"
    evidence: dict[str, Any] = {}
    if isinstance(one, float) and isinstance(two, float):
        evidence = {"ratio": two / one if one else float("inf")}
    words = f"multiplies {what} by {said(one)}", f"multiplies {'them' if first else 'it'} by {said(two)}"
    case.add("embedding-scale" if first else "softcap", place, *words, wb.target, **evidence)


def begins(model: Model, wire: Wire) -> bool:
    """Whether a wire leads from where the stream begins: all of it, not one branch of several."""
    structure = model.structure
    if wire.what == "trunk":
        mapped = wire.source in structure.by_out and wire.source in structure.states
        return wire.source in structure.entries or mapped
    alone = wire.what == "add" or len(structure.readers.get(wire.source, [])) < 2
    return wire.source in structure.entries and alone


def multiple(case: Case, wa: Wire, wb: Wire) -> float | None:
    """The number that one model's values are of the other's, where neither is a known function."""
    value = case.a.of_node(wa.source)
    if value is None or wa.held or wb.held:
        return None
    runs = [function(m, w.source, w.target, value.shape[-1]) for m, w in ((case.a, wa), (case.b, wb))]
    if runs[0] is None or runs[1] is None:
        return None
    x = torch.randn(value.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    one, two = runs[0](x), runs[1](x)
    real = case.a.real(case.a.role(wa.source))
    if one.shape != two.shape or one.shape[:2] != real.shape:
        return None
    one, two = one[real], two[real]
    ratio = float((one * two).sum() / one.square().sum().clamp(min=1e-30))
    return ratio if abs(ratio - 1) > 1e-6 and ratio != 0 and close(one * ratio, two) else None


def _equal_scales(a: float | Tensor, b: float | Tensor, tolerance: float) -> bool:
    x, y = torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
    if x.dim() != y.dim():
        x, y = torch.broadcast_tensors(x, y)
    return gap(x, y) < tolerance
