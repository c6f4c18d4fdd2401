"""Experts whose own maps are seen in one model alone: what they give in the other is tried out.

Matrices may be gathered for each token, or hidden in another way; what an expert gives for every token is
known all the same (`routing.measure`). It is computed from the other model's matrices under each candidate.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from isoform.verify.align import Inner, Model
from isoform.verify.diagnose.bodies import ACTIVATIONS, Body, identify_body
from isoform.verify.diagnose.case import Case
from isoform.verify.diagnose.parts import Router
from isoform.verify.diagnose.unary import gap

SAME = 1e-6


def networks(model: Model, router: Router) -> list[Inner]:
    """The networks of a router's experts, in order, as far as they are seen."""
    graph = model.graph
    inside = graph.ancestors([router.end]) - graph.ancestors([router.choice])
    return [x for x in model.structure.experts if x.out.node in inside]


def try_out(
    case: Case, routers: tuple[Router, Router], read: Tensor, alone: tuple[Tensor, Tensor]
) -> float | None:
    """Name what the experts' networks do in one model and in the other.

    Args:
        case: the two models.
        routers: the choice of experts in each.
        read: ``[N, d]`` what the experts read, in both.
        alone: ``[E, N, d]`` what each expert gives in each model, up to a factor that all have.

    Returns:
        B's factor by A's, if every expert that differs is explained; else None.
    """
    for side, model in enumerate((case.a, case.b)):
        own = networks(model, routers[side])
        if len(own) != len(alone[side]) or networks((case.b, case.a)[side], routers[1 - side]):
            continue
        found = _explained(model, own, read, alone[side], alone[1 - side])
        if found is None:
            return None
        for (kind, ours, theirs), experts in found[0].items():
            whose = "" if len(experts) == len(own) else f" of expert {', '.join(map(str, experts))}"
            place = case.place("feed-forward" + whose, routers[0].end, routers[1].end)
            words = (theirs, ours) if side else (ours, theirs)
            case.add(kind, place, *words, routers[1].end, experts=experts)
        return 1 / found[1] if side else found[1]
    return None


Said = tuple[str, str, str]
"""A slug, and what each model does."""


def _explained(
    model: Model, own: list[Inner], read: Tensor, here: Tensor, there: Tensor
) -> tuple[dict[Said, list[int]], float] | None:
    """What is said of which experts, and the other model's factor by this one's."""
    found: dict[Said, list[int]] = {}
    factors: list[float] = []
    for expert, inner in enumerate(own):
        body = identify_body(model, inner)
        before = torch.cat([read @ s.weight.t() + s.bias for s in inner.sources], -1)
        for number, (said, hidden) in enumerate(_forms(body, before)):
            tried = hidden @ inner.out.weight.t() + inner.out.bias
            if number == 0:
                own_factor = _factor(tried, here[expert])
                if own_factor is None:
                    return None
                factors.append(own_factor)
            other = _factor(tried, there[expert])
            if other is not None:
                factors[expert] = other / factors[expert]
                for one in said:
                    found.setdefault(one, []).append(expert)
                break
        else:
            return None
    if max(factors) - min(factors) > SAME * max(factors):
        return None
    return found, factors[0]


def _factor(a: Tensor, b: Tensor) -> float | None:
    ratio = float((a * b).sum() / a.square().sum().clamp(min=1e-30))
    return ratio if ratio > 0 and gap(a * ratio, b) <= SAME else None


def _forms(body: Body, x: Tensor) -> Iterator[tuple[list[Said], Tensor]]:
    """What may stand between two maps, the body as it is first: what is said of it, and its values."""
    own = body.activation
    if own not in ACTIVATIONS or body.after is not None or body.shift is not None:
        return
    other = {n: ("activation", f"applies {own}", f"applies {n}") for n in ACTIVATIONS if n != own}
    act = ACTIVATIONS[own]
    if body.form == "pointwise":
        yield [], act(x)
        yield from (([said], ACTIVATIONS[n](x)) for n, said in other.items())
    elif body.form == "gated" and body.gate is not None:
        rest = torch.ones(x.shape[-1], dtype=torch.bool)
        rest[body.gate] = False
        gate, content = x[..., body.gate], x[..., rest]
        swapped = ("gate-order", "activates the gate", "activates the content")
        yield [], act(gate) * content
        yield [swapped], act(content) * gate
        yield [("gate-order", swapped[1], "activates the product")], act(content * gate)
        yield from (([said], ACTIVATIONS[n](gate) * content) for n, said in other.items())
        yield from (([swapped, said], ACTIVATIONS[n](content) * gate) for n, said in other.items())
