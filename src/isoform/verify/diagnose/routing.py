"""Which experts a token goes to, and with what weights.

The experts' results are put together with weights that are a function of the router's scores. That function
is measured: scores that point at one expert give its result alone, and other scores a mixture of these, from
which the weights follow by least squares. So it does not matter how the experts are called.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from isoform.verify.align import Key, Model
from isoform.verify.diagnose.case import Case
from isoform.verify.diagnose.expert_bodies import networks, try_out
from isoform.verify.diagnose.parts import Router
from isoform.verify.diagnose.pieces import MOVES
from isoform.verify.diagnose.unary import gap

CERTAIN = 60.0
"""A score this far above all others is certain for softmax and sigmoid."""


@dataclasses.dataclass(eq=False)
class Measured:
    """A router's function.

    Attributes:
        scores: ``[N, E]`` that were given.
        weights: ``[N, E]`` that came out, the weight of a certain expert being 1.
        alone: ``[E, N, d]`` the result of each expert alone, times whatever factor there is.
    """

    scores: Tensor
    weights: Tensor
    alone: Tensor


def explain(case: Case, tops_a: Mapping[Key, int], tops_b: Mapping[Key, int], sums: tuple[int, int]) -> bool:
    """Whether a sum of the stream differs by its experts, or by what these read, alone; notes how.

    Args:
        case: the two models.
        tops_a: what the sum is made of in A.
        tops_b: likewise in B.
        sums: its node in A and in B.
    """
    names = [n for n in tops_b if n in tops_a and _router(case.b, tops_b[n]) and _router(case.a, tops_a[n])]
    if len(names) != 1:
        return False
    a, b = _router(case.a, tops_a[names[0]]), _router(case.b, tops_b[names[0]])
    assert a is not None and b is not None
    streams = [n for n in tops_b if n != names[0]]
    given: dict[int, Tensor] = {}
    for name in streams:
        value = case.a.of_node(tops_a[name])
        if value is not None and case.b.of_node(tops_b[name], value.shape[-1]) is not None:
            given[tops_b[name]] = case.b.graph.shaped(value, tops_b[name], value.shape[-1])
    if a.linear.weight.shape != b.linear.weight.shape:
        return False
    stream = dict(given)
    reads = _bare(case.a, a.linear.read), _bare(case.b, b.linear.read)
    value = case.a.of_node(reads[0])
    if value is not None and case.b.of_node(reads[1], value.shape[-1]) is not None:
        given[reads[1]] = case.b.graph.shaped(value, reads[1], value.shape[-1])
    try:
        one, two = measure(case.a, a, {}), measure(case.b, b, given)
    except (RuntimeError, IndexError):  # sizes that hang on which experts were chosen
        return False
    if one is None or two is None or one.alone.shape != two.alone.shape:
        return False
    factor = float((one.alone * two.alone).sum() / one.alone.square().sum())
    if factor == 0 or gap(one.alone * factor, two.alone) > 1e-6:
        tried = None
        if value is not None:
            tried = try_out(case, (a, b), value.flatten(0, 1), (one.alone, two.alone))
        if tried is None:
            _experts_differ(case, a, b, one, two)
        factor = tried or 1.0  # not to be told where the experts are others in a way of their own
        if gap(one.weights, two.weights) < 1e-6 and abs(factor - 1) < 1e-6:
            return True
    words_a, words_b = _words(one), _words(two)
    if abs(factor - 1) > 1e-6:
        words_b += f", and multiplies by {factor:.6g} of the other's factor"
    if gap(one.weights, two.weights) < 1e-6 and abs(factor - 1) < 1e-6:
        given = {
            **stream,
            b.end: case.b.graph.evaluate(b.end, given),
        }  # what is read may be the stream itself
        return _by_reading(case, given, sums)
    place = case.place("choice of experts", a.choice, b.choice)
    different = float((one.weights - two.weights).abs().max())
    case.add("expert-routing", place, words_a, words_b, b.choice, factor=factor, largest_difference=different)
    return True


def _by_reading(case: Case, given: Mapping[int, Tensor], sums: tuple[int, int]) -> bool:
    """Whether a sum is the same once the experts read the same: that is compared elsewhere."""
    ours = case.a.of_node(sums[0])
    if ours is None:
        return False
    found = case.b.graph.canonical(case.b.graph.evaluate(sums[1], given), ours.shape[-1], sums[1])
    return found is not None and case.differ(ours, found, case.a.role(sums[0])) <= case.tolerance


def _experts_differ(case: Case, a: Router, b: Router, one: Measured, two: Measured) -> None:
    """Some experts are other functions: what is the matter is said where their own maps are compared."""
    found = [e for e in range(len(one.alone)) if gap(one.alone[e], two.alone[e]) > 1e-6]
    own = {x.node for x in b.experts}
    own |= {x.node for network in networks(case.b, b) for x in (network.out, *network.sources)}
    if not any(raw.order in own for raw in case.raw):
        place = case.place("experts", a.end, b.end)
        names = ", ".join(map(str, found))
        case.add(
            "unexplained",
            place,
            f"gives one result for the tokens of experts {names}",
            "gives another",
            b.end,
            experts=found,
        )


def _bare(model: Model, node: int) -> int:
    """Back over views and orders of axes: what the experts read too."""
    graph = model.graph
    while graph.nodes[node].op in MOVES and graph.live_args(node):
        above = graph.live_args(node)[0]
        if graph.values[above].numel() != graph.values[node].numel():
            break
        node = above
    return node


def _router(model: Model, node: int) -> Router | None:
    return next((r for r in model.structure.routers if r.linear.out == node), None)


def measure(model: Model, router: Router, given: Mapping[int, Tensor]) -> Measured | None:
    """A router's function of its scores; None where the results of the experts do not tell it."""
    graph, out = model.graph, router.linear.out
    shape, experts = graph.values[out].shape, router.linear.weight.shape[0]
    width = graph.values[router.end].shape[-1]

    def run(scores: Tensor) -> Tensor | None:
        value = graph.evaluate(router.end, {**given, out: scores.reshape(shape)})
        found = graph.canonical(value, width, router.end)
        return None if found is None else found.reshape(-1, width)

    count = graph.values[out].numel() // experts
    alone: list[Tensor] = []
    for expert in range(experts):
        scores = torch.full((count, experts), -CERTAIN, dtype=torch.float64)
        scores[:, expert] = CERTAIN
        result = run(scores)
        if result is None or len(result) != count:
            return None
        alone.append(result)
    generator = torch.Generator().manual_seed(23)
    scores = 1.5 * torch.randn(count, experts, generator=generator, dtype=torch.float64)
    mixed = run(scores)
    if mixed is None:
        return None
    basis = torch.stack(alone, -1)  # [N, d, E]
    weights = torch.linalg.lstsq(basis, mixed[..., None], driver="gelsd").solution[..., 0]
    if gap((basis @ weights[..., None])[..., 0], mixed) > 1e-6:
        return None
    return Measured(scores, torch.where(weights.abs() < 1e-9, 0.0, weights), torch.stack(alone))


def _words(found: Measured) -> str:
    weights, scores = found.weights, found.scores
    counts = (weights != 0).sum(-1)
    k = int(counts.max())
    chosen = torch.zeros_like(weights).scatter(-1, scores.topk(k, -1).indices, 1.0)
    sigmoid, softmax = scores.sigmoid() * chosen, scores.softmax(-1) * chosen
    forms = {
        f"gives a token's {k} best experts their softmax among all": softmax,
        f"gives a token's {k} best experts their softmax, made to add up to one": _one(softmax),
        f"gives a token's {k} best experts their sigmoid": sigmoid,
        f"gives a token's {k} best experts their sigmoid, made to add up to one": _one(sigmoid),
        f"gives a token's {k} best experts equal weights": _one(chosen),
    }
    return next(
        (name for name, form in forms.items() if gap(form, weights) < 1e-6),
        f"weighs {k} experts a token in a way of its own",
    )


def _one(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)
