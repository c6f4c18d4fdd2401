"""Two norms compared: ε, gain, bias, and whose they are."""

from __future__ import annotations

import torch
from torch import Tensor

from isoform.verify.align import Model
from isoform.verify.diagnose.case import Case
from isoform.verify.diagnose.report import Place
from isoform.verify.diagnose.unary import Step, close
from isoform.verify.diagnose.wiring import Wire


def beside_attention(case: Case, wire: Wire) -> bool:
    """Whether a feed-forward network reads the same point of the stream as an attention, in both models."""
    if wire.what != "read" or wire.name[0] not in ("inner", "other"):  # other: a network of experts
        return False
    found: list[bool] = []
    for model in (case.a, case.b):
        own = model.structure.tops(model.reads[wire.name[:2]])
        reads = [node for key, node in model.reads.items() if key[0] == "site"]
        found.append(any(model.structure.tops(node) == own for node in reads))
    return all(found)


def norm_differs(case: Case, place: Place, order: int, a: Step, b: Step) -> None:
    assert a.gain is not None and b.gain is not None and a.bias is not None and b.bias is not None
    add = lambda kind, x, y, **e: case.add(kind, place, x, y, order, **e)  # noqa: E731
    width = len(a.gain)
    if a.norm != b.norm:
        biased = [float(s.bias.abs().max()) > 0 for s in (a, b) if s.bias is not None]
        with_bias = [
            "" if biased[0] == biased[1] else (" and a bias" if x else " without a bias") for x in biased
        ]
        words = [
            f"applies {str(s).split(' with')[0]}{more} here"
            for s, more in zip((a, b), with_bias, strict=True)
        ]
        hint = "the kind of norm differs: one subtracts the mean and the other does not"
        add("unexplained", *words, hint=hint)
    doubled = twice(a, b), twice(b, a)
    if any(doubled):
        words = {False: "normalises here", True: "normalises twice in a row"}
        add("norm-missing", words[doubled[1]], words[doubled[0]])
        return
    ratio = b.gain / a.gain
    unbiased = ((width - 1) / width) ** 0.5
    factor = float(ratio.median())
    bessel = min(abs(factor - unbiased), abs(factor - 1 / unbiased)) < 1e-6 and float(ratio.std()) < 1e-6
    if bessel:
        n, m = (f"n = {width}", f"n − 1 = {width - 1}")
        add(
            "norm-eps",
            f"divides the variance by {n if factor < 1 else m}",
            f"divides it by {m if factor < 1 else n}",
        )
    else:
        eps_differs(case, place, order, a, b)
    near = max(1e-6, case.constants)  # gains may be rounded after something was folded into them
    foreign: dict[str, tuple[str | None, str | None]] = {}
    if not bessel and not close(a.gain, b.gain, near):
        offset = b.gain - a.gain
        unit = _unit(case, a, b, 10 * near)
        if unit is not None and float(offset.std()) < 10 * near * unit:
            more, less = "multiplies by 1 + w", "multiplies by w"
            up = float(offset.mean()) > 0
            add("norm-offset", less if up else more, more if up else less)
        elif float((b.gain - b.gain[0]).abs().max()) < 1e-6 or float((a.gain - a.gain[0]).abs().max()) < 1e-6:
            flat_a, flat_b = (float((s.gain - s.gain[0]).abs().max()) < 1e-6 for s in (a, b))  # type: ignore[operator,index]
            add(
                "norm-missing",
                "has no gain of its own" if flat_a else "multiplies by a gain",
                "has no gain of its own" if flat_b else "multiplies by a gain",
            )
        elif float(ratio.std()) < 1e-6 * abs(factor):  # the same gain, times a number
            add("softcap", "multiplies by its gain", f"multiplies by {factor:.6g} times that", ratio=factor)
        else:
            foreign["gain"] = whose(case.a, b.gain), whose(case.b, a.gain)
    # What is multiplied behind a norm is its gain and its bias.
    scaled = float(ratio.std()) < 1e-6 * abs(factor) and close(a.bias * factor, b.bias, near)
    if (
        not (scaled or close(a.bias, b.bias, near))
        and float(torch.maximum(a.bias.abs().max(), b.bias.abs().max())) > 1e-9
    ):
        none_a, none_b = float(a.bias.abs().max()) == 0, float(b.bias.abs().max()) == 0
        if a.norm != b.norm and (none_a or none_b):
            pass  # said of the kind of norm
        elif none_a or none_b:
            add(
                "bias-missing",
                "adds no bias after the norm" if none_a else "adds a bias after the norm",
                "adds none" if none_b else "adds one",
            )
        else:
            foreign["bias"] = whose(case.a, b.bias), whose(case.b, a.bias)
    if foreign:
        sides = [i for i in (0, 1) if all(found[i] is not None for found in foreign.values())]
        own = f"uses its own {' and '.join(foreign)} here"
        other = "uses another norm's" if sides else "uses others, that are not in the checkpoint"
        words = (
            (other, own) if sides == [1] else (own, other)
        )  # whose norm stands elsewhere in the other model
        found = {what: pair[sides[0] if sides else 0] for what, pair in foreign.items()}
        add("norm-missing" if sides else "tie-lost", *words, found=found)


def _unit(case: Case, a: Step, b: Step, near: float) -> float | None:
    """How much more one of two gains is, everywhere, if one multiplies by w and the other by 1 + w."""
    assert a.gain is not None and b.gain is not None
    more = float((b.gain - a.gain).mean())
    if abs(abs(more) - 1) < near:
        return 1.0
    low = a.gain if more > 0 else b.gain  # both times a number that follows the norm
    known = any(
        v.shape == low.shape and v.is_floating_point() and close(v.double() * abs(more), low, near)
        for v in case.a.parameters.values()
    )
    return abs(more) if known else None


def twice(once: Step, again: Step) -> bool:
    """Whether the second step is the first after a norm without gain: together they look like one norm."""
    assert once.gain is not None and again.gain is not None
    shrunk = once.gain / (1 + once.eps) ** 0.5
    small = once.eps**2 / (1 + once.eps)
    return once.eps > 1e-7 and 0.9 < again.eps / small < 1.1 and close(shrunk, again.gain, 1e-7)


def eps_differs(case: Case, place: Place, order: int, a: Step, b: Step) -> None:
    """Name another ε, or one that is added elsewhere."""
    if a.outside != b.outside and max(a.eps, b.eps) > 1e-14:
        said_a, said_b = ("outside" if s.outside else "inside" for s in (a, b))
        words = f"adds ε {said_a} the root", f"adds it {said_b}"
        case.add("norm-eps", place, *words, order, reference=a.eps, candidate=b.eps)
    elif not _equal_eps(a.eps, b.eps):
        words = f"uses ε = {a.eps:.3g}", f"uses ε = {b.eps:.3g}"
        case.add("norm-eps", place, *words, order, reference=a.eps, candidate=b.eps)


def _equal_eps(a: float, b: float) -> bool:
    if max(a, b) < 1e-14:
        return True
    return min(a, b) / max(a, b) > 0.97


def whose(model: Model, vector: Tensor) -> str | None:
    """The parameter of a model that a vector is, up to 1 + w and a factor near one (n − 1 for n)."""
    for name, value in model.parameters.items():
        if value.shape[-1:] != vector.shape or value.dim() > 2 or not value.is_floating_point():
            continue
        rows = value.double().reshape(-1, len(vector))  # one a layer, where they are stacked
        for shift in (0.0, 1.0):
            own = rows + shift
            factors = (own * vector).sum(1) / own.square().sum(1).clamp(min=1e-30)
            apart = (own * factors[:, None] - vector).abs().amax(1) / vector.abs().max().clamp(min=1e-30)
            near = ((factors > 0.7) & (factors < 1.4) & (apart < 1e-5)).nonzero()[:, 0]
            if len(near):
                return name if value.dim() == 1 else f"{name}[{int(near[0])}]"
    return None
