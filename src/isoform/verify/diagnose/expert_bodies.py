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


def try_out(case: Case, routers: tuple[Router, Router], read: Tensor, alone: tuple[Tensor, Tensor]) -> bool:
    """Name what the experts' networks do in one model and in the other.

    Args:
        case: the two models.
        routers: the choice of experts in each.
        read: ``[N, d]`` what the experts read, in both.
        alone: ``[E, N, d]`` what each expert gives in each model, up to a factor that all have.

    Returns:
        Whether every expert that differs is explained.
    """
    for side, model in enumerate((case.a, case.b)):
        own = networks(model, routers[side])
        if len(own) == len(alone[side]) and not networks((case.b, case.a)[side], routers[1 - side]):
            return _explained(
                case, model, own, routers, read, (alone[side], alone[1 - side]), swapped=bool(side)
            )
    return False


def _explained(
    case: Case,
    model: Model,
    own: list[Inner],
    routers: tuple[Router, Router],
    read: Tensor,
    alone: tuple[Tensor, Tensor],
    *,
    swapped: bool,
) -> bool:
    found: dict[tuple[str, str, str], list[int]] = {}
    for expert, inner in enumerate(own):
        body = identify_body(model, inner)
        before = torch.cat([read @ s.weight.t() + s.bias for s in inner.sources], -1)
        given = next(_forms(body, before), None)
        if given is None:
            return False
        result = given[2] @ inner.out.weight.t() + inner.out.bias
        factor = float((result * alone[0][expert]).sum() / result.square().sum())
        if gap(result * factor, alone[0][expert]) > SAME:
            return False
        if gap(alone[0][expert], alone[1][expert]) <= SAME:
            continue
        for kind, words, hidden in _forms(body, before):
            tried = (hidden @ inner.out.weight.t() + inner.out.bias) * factor
            if gap(tried, alone[1][expert]) <= SAME:
                found.setdefault((kind, given[1], words), []).append(expert)
                break
        else:
            return False
    for (kind, ours, theirs), experts in found.items():
        whose = "" if len(experts) == len(own) else f" of expert {', '.join(map(str, experts))}"
        place = case.place("feed-forward" + whose, routers[0].end, routers[1].end)
        words = (theirs, ours) if swapped else (ours, theirs)
        case.add(kind, place, *words, routers[1].end, experts=experts)
    return bool(found)


def _forms(body: Body, x: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    """What may stand between two maps, the body as it is first: the slug, words, and its values."""
    if body.activation not in ACTIVATIONS or body.after is not None or body.shift is not None:
        return
    names = [body.activation, *(n for n in ACTIVATIONS if n != body.activation)]
    if body.form == "pointwise":
        yield from (("activation", f"applies {n}", ACTIVATIONS[n](x)) for n in names)
    elif body.form == "gated" and body.gate is not None:
        rest = torch.ones(x.shape[-1], dtype=torch.bool)
        rest[body.gate] = False
        gate, content = x[..., body.gate], x[..., rest]
        yield "activation", f"applies {body.activation}", ACTIVATIONS[body.activation](gate) * content
        yield "gate-order", "activates the content", ACTIVATIONS[body.activation](content) * gate
        yield "gate-order", "activates the product", ACTIVATIONS[body.activation](content * gate)
        yield from (("activation", f"applies {n}", ACTIVATIONS[n](gate) * content) for n in names[1:])
