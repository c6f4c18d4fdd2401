"""What is added to the token vectors, compared: positions, their start, their layout."""

from __future__ import annotations

import torch
from torch import Tensor

from isoform.verify.diagnose.case import Case
from isoform.verify.diagnose.report import Place
from isoform.verify.diagnose.unary import gap


def explain_shift(case: Case, place: Place, a: Tensor, b: Tensor, role: str, order: int) -> None:
    """Two things ``[B, T, d]`` that are added to token vectors: how does one come from the other?"""
    real = case.a.real(role)
    if a.abs().max() < 1e-9 or b.abs().max() < 1e-9:
        none_a = bool(a.abs().max() < 1e-9)
        case.add(
            "unexplained",
            place,
            "adds nothing to the token vectors" if none_a else "adds position vectors",
            "adds position vectors" if none_a else "adds nothing to them",
            order,
        )
        return
    near = max(1e-6, case.constants)
    permuted = _channels(a[real], b[real], near)
    if permuted is not None:
        case.add(
            "sinusoid-layout",
            place,
            f"lays the channels of a position out as {_layout(a[real])}",
            "has the same values in other channels",
            order,
            permutation=permuted,
        )
        return
    index_a, index_b = _index(case, a, near), _index(case, b, near)
    table = index_a is not None and index_b is not None
    if not table:
        places = torch.arange(a.shape[1]).expand(a.shape[0], -1)
        counted = _by_place(b, real, near) and not _by_place(a, real, near)
        index_a = _among(b, a, real, near) if counted else places
        index_b = places if counted else _among(a, b, real, near)
    if index_a is not None and index_b is not None:
        known = real & (index_b >= 0) & (index_a >= 0)
        offset = (index_b - index_a)[known]
        if len(offset) and len(offset.unique()) == 1 and known.sum() * 2 > real.sum() and int(offset[0]) != 0:
            starts = [int(i[real][i[real] >= 0].min()) for i in (index_a, index_b)]
            if not table:
                starts = [0, int(offset[0])]
            case.add(
                "position-offset",
                place,
                f"gives the first token position {starts[0]}",
                f"gives it position {starts[1]}",
                order,
                offset=int(offset[0]),
            )
            return
        falls_a, falls_b = (_falls(i, real) for i in (index_a, index_b))
        if falls_a != falls_b and bool(known.sum() == real.sum()):
            words = "starts positions anew in every document", "counts on through all documents of a row"
            case.add("document-leak", place, words[not falls_a], words[not falls_b], order)
            return
        full = real.all(-1)
        moved = torch.stack(
            [
                (index_b - index_a)[i][known[i]].abs().amax() if known[i].any() else torch.tensor(0)
                for i in range(len(real))
            ]
        )
        if bool((moved[~full] != 0).any()) and bool((moved[full] == 0).all()):
            count = _counts(index_a, real)
            case.add(
                "position-padding",
                place,
                "counts real tokens" if count else "counts places, padding too",
                "counts places, padding too" if count else "counts real tokens",
                order,
                rows=(moved != 0).nonzero()[:, 0].tolist(),
            )
            return
    case.add(
        "unexplained",
        place,
        "adds its position vectors",
        "adds others",
        order,
        relative_difference=gap(a[real], b[real]),
    )


def _falls(index: Tensor, real: Tensor) -> bool:
    """Whether positions begin anew somewhere within a row, and go up by one everywhere else."""
    step, inside = index[:, 1:] - index[:, :-1], real[:, 1:] & real[:, :-1]
    least = torch.where(real, index, index.max()).amin(1, keepdim=True)
    anew = (step < 0) & (index[:, 1:] == least) & inside
    return bool(anew.any()) and bool((anew | (step == 1))[inside].all())


def _counts(index: Tensor, real: Tensor) -> bool:
    """Whether positions, as far as they are known, go by the number of real tokens in front."""
    known = real & (index >= 0)
    return len((index - real.long().cumsum(1))[known].unique()) == 1


def _channels(a: Tensor, b: Tensor, near: float) -> list[int] | None:
    """The permutation of channels that turns a into b, if one does."""
    distance = (a[:, :, None] - b[:, None, :]).abs().amax(0)
    best = distance.argmin(0)
    if len(best.unique()) != len(best) or float(distance.amin(0).max()) > near * float(a.abs().max()):
        return None
    return best.tolist()


def _layout(a: Tensor) -> str:
    d = a.shape[-1]
    half = (a[:, : d // 2].square() + a[:, d // 2 : 2 * (d // 2)].square()).std()
    pair = (a[:, 0::2][:, : d // 2].square() + a[:, 1::2][:, : d // 2].square()).std()
    if min(float(half), float(pair)) > 1e-6:
        return "it has them"
    return "all sines, then all cosines" if half < pair else "a sine and a cosine in turn"


def _index(case: Case, shift: Tensor, near: float) -> Tensor | None:
    """For each vector its row of a table of parameters."""
    tables = _tables(case, shift.shape[-1])
    for table in tables:
        found = _rows(table, shift, near)
        if int(found[0, 0]) >= 0:
            return found
    return None


def _tables(case: Case, width: int) -> list[Tensor]:
    values = (v for m in (case.a, case.b) for v in m.parameters.values())
    flat = (v.squeeze() for v in values if v.is_floating_point())  # with an axis for the batch in front
    return [v.double() for v in flat if v.dim() == 2 and v.shape[1] == width]


def _rows(table: Tensor, shift: Tensor, near: float) -> Tensor:
    """For each vector the row of a table that it is, −1 for none."""
    flat = shift.reshape(-1, shift.shape[-1])
    best = torch.cdist(flat, table, compute_mode="donot_use_mm_for_euclid_dist").min(1)
    found = torch.where(best.values < near * flat.norm(dim=1).clamp(min=1e-12), best.indices, -1)
    return found.reshape(shift.shape[:2])


def _by_place(shift: Tensor, real: Tensor, near: float) -> bool:
    """Whether the same vector never stands at two places."""
    vectors, places = shift[real], real.nonzero()[:, 1]
    same = torch.cdist(vectors, vectors) < near * vectors.norm(dim=1).amax()
    return bool((places[:, None] == places[None])[same].all())


def _among(a: Tensor, b: Tensor, real: Tensor, near: float) -> Tensor:
    """For each vector of b the place of the same vector in a."""
    table = a[real]
    places = torch.arange(a.shape[1]).expand(a.shape[0], -1)[real]
    found = _rows(table, b, near)
    out = torch.where(found >= 0, places[found.clamp(min=0)], -1)
    same = (a - b).abs().amax(-1) < near * a.abs().max()
    own = torch.arange(a.shape[1]).expand(a.shape[0], -1)
    return torch.where(same, own, out)
