"""Experts whose own maps are seen in one model alone: what they give in the other is tried out.

Matrices may be gathered for each token, or hidden in another way; what an expert gives for every token is
known all the same (`routing.measure`). It is computed from the other model's matrices under each candidate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isoform.verify.align import Inner, Model
from isoform.verify.diagnose.bodies import identify_body
from isoform.verify.diagnose.case import Case
from isoform.verify.diagnose.parts import Router
from isoform.verify.diagnose.residues import Said, forms
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


def _explained(
    model: Model, own: list[Inner], read: Tensor, here: Tensor, there: Tensor
) -> tuple[dict[Said, list[int]], float] | None:
    """What is said of which experts, and the other model's factor by this one's."""
    found: dict[Said, list[int]] = {}
    factors: list[float] = []
    for expert, inner in enumerate(own):
        body = identify_body(model, inner)
        before = torch.cat([read @ s.weight.t() + s.bias for s in inner.sources], -1)
        for number, (said, hidden) in enumerate(forms(body, before)):
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
